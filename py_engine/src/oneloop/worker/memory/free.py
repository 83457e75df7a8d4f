"""Memory of the machine and of its GPU that this process can still take."""

from __future__ import annotations

import os
from pathlib import Path

from oneloop.device.nvml import first_gpu
from oneloop.worker.memory.ledger import DeviceMemory


def gpu_memory() -> DeviceMemory | None:
    """Bytes of the GPU that this process would use, by NVML's count; None where NVML says nothing."""
    gpu = first_gpu()
    return None if gpu is None else DeviceMemory(total=gpu.total_bytes, free=gpu.free_bytes)


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
