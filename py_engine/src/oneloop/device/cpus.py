"""How many CPUs this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus(quota_file: Path = CPU_QUOTA) -> int:
    """CPUs that the process may run on, or that its control group grants where that is less; at least 1.

    quota_file: "quota period" in µs, or "max period"; missing where there is no control group with a limit.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(cpus, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus
