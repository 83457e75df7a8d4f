"""RequestStream: one request's way from the step loop to its consumer.

The loop pushes, the consumer takes. A consumer that is slower than the engine finds the deltas of several steps merged,
one per sequence, so what waits here never exceeds the request's own output.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.engine.outputs import FinishReason, SequenceDelta

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from oneloop_core import Delta


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the monotonic clock; None until it happened."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    queue_s: float | None = None
    """Length of the wait for admission, from the core."""


class RequestStream:
    """An async iterator over lists of SequenceDelta (one per sequence that has news).

    Use it as an async context manager, or call `abort()` when done early: leaving it unfinished aborts the request.
    It ends after every sequence's finish reason was taken. Belongs to the event loop it was made on.
    """

    __slots__ = (
        "_on_abort", "_open", "_pending", "_waiter", "handle", "num_cached_tokens", "num_generated_tokens",
        "num_sequences", "prompt", "prompt_token_ids", "request_id", "times",
    )  # fmt: skip

    def __init__(
        self,
        *,
        handle: int,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_sequences: int,
        arrived: float,
        on_abort: Callable[[RequestStream], None],
    ) -> None:
        self.handle = handle
        """The core's handle."""
        self.request_id = request_id
        self.prompt = prompt
        """Text of the prompt, where the caller gave text."""
        self.prompt_token_ids = prompt_token_ids
        self.num_sequences = num_sequences
        self.num_cached_tokens = 0
        """Prompt tokens that came from the prefix cache (known with the first delta)."""
        self.num_generated_tokens = 0
        """Over all sequences."""
        self.times = RequestTimes(arrived)
        self._open = set(range(num_sequences))
        self._pending: dict[int, SequenceDelta] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._on_abort = on_abort

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended; deltas may still wait to be taken."""
        return not self._open

    async def next_deltas(self) -> list[SequenceDelta]:
        """Everything new, merged per sequence; waits while there is nothing. Empty at the end.

        Cancelling the wait loses nothing and aborts nothing (so `asyncio.wait_for` around it is fine). One consumer.
        """
        while not self._pending and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[SequenceDelta]:
        """As next_deltas(), but being cancelled here aborts the request: its reader is gone."""
        try:
            deltas = await self.next_deltas()
        except asyncio.CancelledError:
            self.abort()
            raise
        if not deltas:
            raise StopAsyncIteration
        return deltas

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request at once and free its blocks. Its open sequences end with "abort". Idempotent."""
        if self._open:
            self._on_abort(self)
            self.end("abort")

    # Below: the engine's side.

    def push(self, delta: Delta, now: float) -> None:
        """Hand over one sequence's delta of one step (monotonic time `now`)."""
        index = delta.index
        if index not in self._open:
            return
        token_ids = delta.token_ids
        if token_ids:
            if self.times.first_token is None:
                self.times.first_token = now
            self.times.last_token = now
            self.num_generated_tokens += len(token_ids)
        if delta.queue_s is not None and self.times.queue_s is None:
            self.times.queue_s = delta.queue_s
            self.num_cached_tokens = delta.num_cached_tokens
        reason = delta.finish_reason
        added = SequenceDelta(
            index, delta.text, token_ids, delta.logprobs, reason, delta.stop_reason, delta.error
        )
        if reason is not None:
            self._close(index, now)
        self._add(added)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End every open sequence with this reason (abort, or the engine's death)."""
        now = asyncio.get_running_loop().time()
        for index in sorted(self._open):
            self._close(index, now)
            self._add(SequenceDelta(index, "", [], None, reason, None, error))

    def _close(self, index: int, now: float) -> None:
        self._open.discard(index)
        if not self._open:
            self.times.finished = now

    def _add(self, added: SequenceDelta) -> None:
        waiting = self._pending.get(added.index)
        if waiting is None:
            self._pending[added.index] = added
        else:
            waiting.merge(added)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
