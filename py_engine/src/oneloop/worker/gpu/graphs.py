"""CUDA graphs of a step's launches, by bucket: captured once, then launched by one call."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


log = logging.getLogger(__name__)


class StepGraphs:
    """Launches by key. A key that comes for the second time is captured; from then on it is replayed.

    All graphs run on one stream, one after the other, so they share one memory pool: what one leaves in it, the next
    may overwrite. Results that outlive a graph belong into buffers made before. On the CPU, or not enabled, every
    launch is made as it is.
    """

    __slots__ = ("_graphs", "_pool", "_refused", "_seen", "enabled")

    def __init__(self, stream: torch.cuda.Stream | None, *, enabled: bool) -> None:
        """stream: the one that steps run on; None on the CPU."""
        self.enabled = enabled and stream is not None
        """Whether launches are captured at all."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def launch(self, key: Hashable, body: Callable[[], None], *, capturable: bool = True) -> None:
        """Run `body`, which launches the same kernels on the same buffers whenever it is called with this key."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if capturable and key in self._seen:
            self._seen.remove(key)
            try:
                self.capture(key, body)
            except Exception:  # as it is then, from now on
                log.exception("a step could not be captured; it is launched kernel by kernel")
                self._refused.add(key)
            else:
                self._graphs[key].replay()
                return
        body()
        if self.enabled and key not in self._refused:
            self._seen.add(key)

    def capture(self, key: Hashable, body: Callable[[], None]) -> None:
        """Record `body` under the key. It has run before, so that its kernels are compiled and loaded."""
        if not self.enabled:
            return
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            # Not torch.cuda.graph(): that would wait for the device and empty the allocator's cache.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell of
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs[key] = graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection within: freeing a tensor's memory, or another graph, would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bucket_of(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count`; buckets ascend and the last holds the largest step."""
    for bucket in buckets:  # a few dozen; bisect would be no faster here
        if bucket >= count:
            return bucket
    raise ValueError(f"{count} exceeds the largest bucket, {buckets[-1]}")


def row_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that decode steps are padded to: finer where a row more costs more."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def token_bucket(num_tokens: int) -> int:
    """Tokens that a step with prefill is padded to: at most one part in nine more, whole tiles of the products."""
    multiple = 16
    while multiple < 256 and num_tokens > 16 * multiple:
        multiple *= 2
    return -(-num_tokens // multiple) * multiple


def token_buckets(largest: int) -> list[int]:
    """All that token_bucket gives for up to `largest` tokens, the largest first."""
    return sorted({token_bucket(count) for count in range(1, largest + 1)}, reverse=True)
