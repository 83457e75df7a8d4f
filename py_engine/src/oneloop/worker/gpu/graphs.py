"""CUDA graphs of a step's launches, by bucket: captured once, then launched by one call."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch

from oneloop.collector import no_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch.cuda import _POOL_HANDLE

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 4
"""Captures of a key that may fail for want of memory; then it is launched kernel by kernel for good."""
RETRY_AFTER: Final = 200
"""Launches of the key between two such attempts: by then other requests may have freed some."""
_NEVER: Final = -1


class StepGraphs:
    """Launches by key. A key that comes for the second time is captured; from then on it is replayed.

    All graphs run on one stream, one after the other, so they share one memory pool: what one leaves in it, the next
    may overwrite. Results that outlive a graph belong into buffers made before. On the CPU, or not enabled, every
    launch is made as it is.
    """

    __slots__ = ("_attempts", "_graphs", "_keeper", "_stream", "_waits", "enabled")

    def __init__(self, stream: torch.cuda.Stream | None, *, enabled: bool) -> None:
        """stream: the one that steps run on; None on the CPU."""
        self.enabled = enabled and stream is not None
        """Whether launches are captured at all."""
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._waits: dict[Hashable, int] = {}
        """Launches of a key before its capture is tried."""
        self._attempts: dict[Hashable, int] = {}
        """Failed captures of a key."""
        self._keeper: torch.cuda.CUDAGraph | None = None
        """Never replayed. It keeps the pool: one that no graph uses is gone, and its handle is refused from then on."""

    def launch(self, key: Hashable, body: Callable[[], None], *, capturable: bool = True) -> None:
        """Run `body`, which launches the same kernels on the same buffers whenever it is called with this key."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if not (self.enabled and capturable):
            body()
            return
        wait = self._waits.get(key, 1)
        if wait == 0 and self.try_capture(key, body):
            self._graphs[key].replay()
            return
        body()
        if wait > 0:
            self._waits[key] = wait - 1

    def capture(self, key: Hashable, body: Callable[[], None]) -> None:
        """Record `body` under the key. It has run before, so that its kernels are compiled and loaded."""
        if not self.enabled:
            return
        if self._keeper is None:
            self._keeper = self._record(self._touch_memory, None)
        self._graphs[key] = self._record(body, self._keeper.pool())

    def wants(self, key: Hashable) -> bool:
        """Whether a graph of that key is missing and its capture has not failed."""
        return self.enabled and key not in self._graphs and key not in self._attempts

    def try_capture(self, key: Hashable, body: Callable[[], None]) -> bool:
        """As capture; False when it failed. More memory may come; what else spoils one spoils the next too."""
        try:
            self.capture(key, body)
        except Exception as error:
            attempts = self._attempts.get(key, 0) + 1
            self._attempts[key] = attempts
            again = isinstance(error, torch.OutOfMemoryError) and attempts < MAX_ATTEMPTS
            self._waits[key] = RETRY_AFTER if again else _NEVER
            log.exception(
                "a step could not be captured; it is launched kernel by kernel%s",
                f" for the next {RETRY_AFTER} times" if again else "",
            )
            return False
        return True

    def _record(self, body: Callable[[], None], pool: _POOL_HANDLE | None) -> torch.cuda.CUDAGraph:
        """pool: None makes one."""
        graph = torch.cuda.CUDAGraph()
        # Freeing a tensor's memory, or another graph, would spoil the capture.
        with no_collections():
            try:
                # Not torch.cuda.graph(): that would wait for the device and empty the allocator's cache.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
            except BaseException:
                self._end_failed_capture(graph, pool)
                raise
        return graph

    def _end_failed_capture(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE | None) -> None:
        """Or later launches would be captured, and later tensors taken from the pool of graphs."""
        try:
            graph.capture_end()
        except Exception:  # the stream captures no more, or never did; the error to tell of is the one before
            if pool is not None and self._stream is not None:
                with suppress(RuntimeError):  # refused where the allocator knows that the capture is over
                    torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
                    self._keeper = None  # the next capture begins a pool whose books are right

    def _touch_memory(self) -> None:
        """One node, since torch warns of a graph without any."""
        torch.zeros(1, device=self._stream.device if self._stream is not None else None)
