"""Where the seconds between a command and a ready engine go."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_START_TIME_FIELD: Final = 22
"""Of /proc/self/stat, counted from 1: clock ticks from boot to the start of the process."""


class StartTimes:
    """Seconds by part, in the order in which parts began. Parts that run side by side overlap. From any thread."""

    __slots__ = ("_age_at_start", "_began", "_lock", "_seconds")

    def __init__(self, age_s: float = 0.0) -> None:
        """age_s: how long the start had taken before, e.g. `process_age_s()`."""
        self._began = time.perf_counter()
        self._age_at_start = age_s
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block under that name, added to what it has."""
        with self._lock:
            self._seconds.setdefault(name, 0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            with self._lock:
                self._seconds[name] += took

    @property
    def seconds(self) -> Mapping[str, float]:
        """Part → seconds so far."""
        with self._lock:
            return dict(self._seconds)

    @property
    def total_s(self) -> float:
        """Since age_s before this object was made."""
        return self._age_at_start + time.perf_counter() - self._began

    def summary(self) -> dict[str, float]:
        """Seconds: "total", "process" (age_s), then the parts."""
        return {"total": self.total_s, "process": self._age_at_start, **self.seconds}

    def __str__(self) -> str:
        """As in "4.10 s: process 0.21, import torch 1.93, weights 1.72"."""
        parts = self.summary()
        total = parts.pop("total")
        return f"{total:.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())


def process_age_s() -> float:
    """Seconds since this process began, to the kernel's tick (10 ms). 0 where the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(after_name[_START_TIME_FIELD - 3])
        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0  # not Linux
    return max(0.0, clock - ticks / os.sysconf("SC_CLK_TCK"))
