"""The engine's side of the native relay: made when the first reply is streamed; tells which streams have stalled."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from oneloop.engine.metrics import SHORT_S
from oneloop_core import StreamRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from oneloop.engine.histogram import Histogram
    from oneloop_core import Delta, Deltas

_CORES_PER_THREAD = 8
MAX_THREADS = 4
"""Writing threads: one can send about 100,000 events a second."""


class Relay:
    """Lanes from commits to sockets, past Python. Belongs to the running event loop."""

    def __init__(self, gaps: Histogram, on_stalled: Callable[[int], None]) -> None:
        """gaps: where times between tokens are counted, with the bounds SHORT_S.

        on_stalled: called with the handle of a request whose socket takes no more.
        """
        self._gaps = gaps
        self._on_stalled = on_stalled
        self._core: StreamRelay | None = None
        self._fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(
        self, handle: int, fd: int, before: bytes, after: bytes, *, chunked: bool, last_token_at: float
    ) -> None:
        """As StreamRelay.attach."""
        core = self._core or self._start()
        core.attach(handle, fd, before, after, chunked=chunked, last_token_at=last_token_at)

    def detach(self, handle: int) -> tuple[bytes, int, float] | None:
        """As StreamRelay.detach."""
        return None if self._core is None else self._core.detach(handle)

    def deliver(self, deltas: Deltas, now: float) -> Iterable[Delta]:
        """Those that no lane took."""
        core = self._core
        if core is None:
            return deltas
        others = core.deliver(deltas, now)
        self._gaps.add(*core.take_gaps())
        return others

    def close(self) -> None:
        """End the threads. Idempotent."""
        core, self._core = self._core, None
        if core is not None and self._loop is not None:
            core.close()
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def _start(self) -> StreamRelay:
        num_threads = min(1 + len(os.sched_getaffinity(0)) // _CORES_PER_THREAD, MAX_THREADS)
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            core = StreamRelay(fd, SHORT_S, num_threads=num_threads)
        except BaseException:
            os.close(fd)
            raise
        self._core, self._fd = core, fd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._take_stalled)
        return core

    def _take_stalled(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        if self._core is not None:
            for handle in self._core.take_stalled():
                self._on_stalled(handle)
