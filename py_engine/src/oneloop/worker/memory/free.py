"""Memory of the machine that this process can still take."""

from __future__ import annotations

import os
from pathlib import Path

from oneloop.worker.memory.ledger import DeviceMemory


def machine_memory() -> DeviceMemory:
    """Bytes of the machine, or of its control group where that allows less."""
    total, free = _machine()
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        free = min(free, max(0, limit - used + _reclaimable(group / "memory.stat")))
        total = min(total, limit)
    except (OSError, ValueError):
        pass  # no control group with a limit
    return DeviceMemory(total=total, free=free)


def _machine() -> tuple[int, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return total, int(value.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    return total, total // 2


def _reclaimable(stat: Path) -> int:
    """Page cache of the control group: counted as used, given back on demand."""
    for line in stat.read_text().splitlines():
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0
