"""How long work reports what it has done. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total): what is a short phrase, done and total are bytes. May be called often."""


def no_progress(what: str, done: int, total: int) -> None:
    """Says nothing."""


class ByteCount:
    """Adds up what several threads have done and reports it, one call at a time and never less than before."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        """total: bytes in all."""
        self._progress = progress
        self._what = what
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """So many bytes more are done. From any thread."""
        with self._lock:
            self._done += num_bytes
            self._progress(self._what, self._done, self._total)
