"""Streamed text's way from a commit to the sockets: encoded and sent by the core, on the loop's thread, in slices.

Sending is what a token costs most: some µs each in the kernel. A slice is short, so that 500 of them hold up neither
the next step nor the first tokens of new requests; what is still waiting when the next step comes goes along with it,
each step's text as an event of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.engine.metrics import SHORT_S
from oneloop_core import StreamRelay

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.engine.metrics import EngineMetrics
    from oneloop_core import Delta, Deltas, LogprobsEncoder

SLICE_S = 0.001
"""How long sending holds the loop at a time."""


@dataclass(frozen=True, slots=True)
class TextFrame:
    """What is around text in a choice's events, where they differ in nothing but what the relay can fill in."""

    before: bytes
    """Before the text's JSON string."""
    after: bytes
    """What ends an event, or goes before its usage."""
    logprobs: tuple[bytes, LogprobsEncoder] | None = None
    """What goes between the text and the JSON of its log-probabilities, and their encoder."""
    usage: tuple[bytes, bytes, int, int] | None = None
    """What goes between the number of all tokens and that of the output's, and behind it; tokens of prompt and output
    so far."""


class Relay:
    """The lanes of an engine's streams. Belongs to the running event loop.

    Invariant: while a stream is attached its transport's buffer is empty and nobody else writes to its socket.
    """

    def __init__(self, metrics: EngineMetrics, on_stalled: Callable[[int], None]) -> None:
        """on_stalled: called with the handle of a request whose socket takes no more."""
        self._core = StreamRelay(SHORT_S)
        self._gaps = metrics.inter_token_latency_seconds
        self._times = metrics.loop
        self._on_stalled = on_stalled
        self._num_attached = 0
        self._is_scheduled = False

    def attach(self, handle: int, fd: int, frame: TextFrame, *, chunked: bool, last_token_at: float) -> None:
        """As StreamRelay.attach."""
        self._core.attach(
            handle,
            fd,
            frame.before,
            frame.after,
            chunked=chunked,
            last_token_at=last_token_at,
            logprobs=frame.logprobs,
            usage=frame.usage,
        )
        self._num_attached += 1

    def detach(self, handle: int) -> tuple[bytes, int, float] | None:
        """As StreamRelay.detach."""
        left = self._core.detach(handle)
        self._num_attached -= left is not None
        return left

    def deliver(self, deltas: Deltas, now: float) -> Deltas | list[Delta]:
        """Take what is attached streams' text, to be sent from the loop's next turn on; return the others."""
        if not self._num_attached:
            return deltas
        others = self._core.deliver(deltas, now)
        self._gaps.add(*self._core.take_gaps())
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)
        return others

    def _send(self) -> None:
        """One slice; the rest in the turns that follow."""
        began = perf_counter()
        stalled, more = self._core.send(SLICE_S)
        self._times.parts["send"] += perf_counter() - began
        self._is_scheduled = more
        if more:
            asyncio.get_running_loop().call_soon(self._send)
        for handle in stalled:
            self._on_stalled(handle)
