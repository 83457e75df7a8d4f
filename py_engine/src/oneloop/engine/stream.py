"""RequestStream: one request's way from the step loop to its consumer.

The loop pushes, the consumer takes. A consumer that is slower than the engine finds the deltas of several steps merged,
one per sequence, so what waits here never exceeds the request's own output. A consumer that only writes text to a
socket may have that done by the relay: until something else happens than text it then hears of nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.engine.outputs import SequenceDelta

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from oneloop.engine.metrics import EngineMetrics
    from oneloop.engine.outputs import Added, FinishReason
    from oneloop.engine.relay import Relay, TextFrame
    from oneloop_core import Delta, PromptLogprobs

_SEVERITY: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the event loop's clock; None until it happened."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    """Of the sequences that have ended."""
    finished: float | None = None
    queue_s: float | None = None
    """Length of the wait for admission, from the core."""


class RequestStream:
    """An async iterator over lists of Added (one per sequence that has news).

    Use it as an async context manager, or call `abort()` when done early: leaving it unfinished aborts the request.
    It ends after every sequence's finish reason was taken. Belongs to the event loop it was made on.
    """

    __slots__ = (
        "_final_only", "_is_relayed", "_last_token_at", "_metrics", "_on_end", "_on_news", "_pending", "_relay",
        "_unsent", "_waiter", "_wakes_at_end", "bound_by", "cumulative_logprobs", "ends_thinking", "finish_reason",
        "handle", "is_ranked", "num_cached_tokens", "num_generated_tokens", "num_sequences", "pooled", "prompt",
        "prompt_logprobs", "prompt_token_ids", "request_id", "times",
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
        metrics: EngineMetrics,
        on_end: Callable[[RequestStream], None],
        final_only: bool = False,
        relay: Relay | None = None,
        ends_thinking: bool = False,
        is_ranked: bool = True,
        bound_by: str | None = None,
    ) -> None:
        """final_only: the core reports a sequence once, at its end, so tokens have no times of their own.

        relay: None: every delta is the consumer's to write. ends_thinking: whether its thinking can be ended.
        bound_by: the request's field that binds its tokens, if any.
        """
        self.ends_thinking = ends_thinking
        self.is_ranked = is_ranked
        """Whether the log-probabilities beside each token's are the likeliest ones', best first."""
        self.bound_by = bound_by
        self.handle = handle
        """The core's handle."""
        self.request_id = request_id
        self.prompt = prompt
        """Text of the prompt, where the caller gave text."""
        self.prompt_token_ids = prompt_token_ids
        self.num_sequences = num_sequences
        self.num_cached_tokens = 0
        """Prompt tokens that came from the prefix cache (known with the first delta)."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Where asked for; known with the first delta."""
        self.pooled: bytes | None = None
        """The pooled hidden state in float32, where asked for; known at the end."""
        self.cumulative_logprobs: dict[int, float] = {}
        """Of the texts that beam search found, by index; known at the end."""
        self.num_generated_tokens = 0
        """Over all sequences."""
        self.finish_reason: FinishReason | None = None
        """The most severe of the sequences that have ended (stop < length < abort < error)."""
        self.times = RequestTimes(arrived)
        # The sequences that have not ended, each with the time of its last token (None before the first).
        self._last_token_at: dict[int, float | None] = dict.fromkeys(range(num_sequences))
        self._pending: dict[int, Added] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_at_end = False
        self._on_news: Callable[[RequestStream], None] | None = None
        self._metrics = metrics
        self._on_end = on_end
        self._final_only = final_only
        self._relay = relay
        self._is_relayed = False
        self._unsent = b""

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended; deltas may still wait to be taken."""
        return not self._last_token_at

    async def next_deltas(self) -> list[Added]:
        """Everything new, merged per sequence; waits while there is nothing. Empty at the end.

        Cancelling the wait loses nothing and aborts nothing (so `asyncio.wait_for` around it is fine). One consumer.
        """
        await self.wait_news()
        return self.take()

    async def wait_news(self) -> None:
        """Wait until something can be taken, or all has been. What is said of the prompt is known then."""
        while not self._pending and self._last_token_at:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def all_deltas(self) -> list[Added]:
        """Everything, one merged delta per sequence, once all have ended: the reader wakes once, not at every step.

        Cancelling the wait loses nothing and aborts nothing. One consumer.
        """
        while self._last_token_at:
            self._waiter = asyncio.get_running_loop().create_future()
            self._wakes_at_end = True
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._wakes_at_end = False
        return self.take()

    def call_on_news(self, on_news: Callable[[RequestStream], None] | None) -> None:
        """For a reader that is called instead of waiting: `on_news(self)` when something can be taken, maybe now.

        It is called again only after a take(). It runs amid a step's delivery: it may do little and must not raise.
        None: the reader has ended; stream and reader no longer keep each other.
        """
        self._on_news = on_news
        if self._pending and on_news is not None:
            on_news(self)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """What is said of the prompt, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def take(self) -> list[Added]:
        """Everything new, merged per sequence, without waiting. Empty when there is nothing."""
        if not self._pending:
            return []
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    def relay_text(self, fd: int, frame: TextFrame, *, chunked: bool) -> bool:
        """From now on text goes to the socket `fd` by itself, each step's as an event in this frame.

        chunked: as chunks of HTTP/1.1. It ends, and the consumer is called again, with the sequence's end, when the
        socket takes no more, or with abort(); then `take_unsent()` goes before whatever the consumer writes. False, and
        nothing has changed, where it cannot be: there are several sequences, something waits to be taken, no token has
        come, or no descriptor is left.
        """
        last_token_at = self._last_token_at.get(0)
        if self._relay is None or self.num_sequences > 1 or self._pending or last_token_at is None:
            return False
        try:
            self._relay.attach(self.handle, fd, frame, chunked=chunked, last_token_at=last_token_at)
        except OSError:
            return False
        self._is_relayed = True
        return True

    def take_unsent(self) -> bytes:
        """What the relay was given and has not sent, as it goes on the wire. Ends the relaying."""
        self._leave_relay()
        unsent, self._unsent = self._unsent, b""
        return unsent

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[Added]:
        """As next_deltas(), but being cancelled here aborts the request: its reader is gone."""
        try:
            while not self._pending and self._last_token_at:  # next_deltas() without a coroutine of its own
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None
        if not self._pending:
            raise StopAsyncIteration
        return self.take()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request at once and free its blocks. Its open sequences end with "abort". Idempotent."""
        self.end("abort")

    # Below: the engine's side.

    def push(self, delta: Delta, now: float) -> None:
        """Hand over one sequence's delta of one step. now: the event loop's time."""
        if self._is_relayed:
            self._leave_relay()
        index, last_token_at = delta.index, self._last_token_at
        if index not in last_token_at:
            return
        token_ids, before = delta.token_ids, last_token_at[index]
        if before is None:
            self._begin(index, delta, now)
        elif token_ids:
            self._metrics.inter_token_latency_seconds.observe((now - before) / len(token_ids), len(token_ids))
            last_token_at[index] = now
        self.num_generated_tokens += len(token_ids)
        self._add(index, delta)
        reason = delta.finish_reason
        if reason is not None:
            self._close(index, reason, now)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End every open sequence with this reason (abort, or the engine's death). Idempotent."""
        self._leave_relay()
        now = asyncio.get_running_loop().time()
        for index in list(self._last_token_at):
            self._add(index, SequenceDelta(index, "", [], None, reason, None, error))
            self._close(index, reason, now)

    def stalled(self) -> None:
        """The socket that the relay writes to takes no more."""
        if self._is_relayed:
            self._leave_relay()
            if self._on_news is not None:
                self._on_news(self)

    def _leave_relay(self) -> None:
        """Take back what the relay has of this stream."""
        if not self._is_relayed:
            return
        self._is_relayed = False
        assert self._relay is not None
        left = self._relay.detach(self.handle)
        if left is not None:
            unsent, num_tokens, last_token_at = left
            self._unsent += unsent
            self.num_generated_tokens += num_tokens
            self._last_token_at[0] = last_token_at

    def _begin(self, index: int, delta: Delta, now: float) -> None:
        """A sequence without a token so far: what is told once."""
        times = self.times
        if delta.cumulative_logprob is not None:
            self.cumulative_logprobs[index] = delta.cumulative_logprob
        if index == 0:
            self.prompt_logprobs, self.pooled = delta.prompt_logprobs, delta.pooled
        if times.queue_s is None and delta.queue_s is not None:
            times.queue_s = delta.queue_s
            self.num_cached_tokens = delta.num_cached_tokens
        if self._final_only or not delta.token_ids:
            return
        if times.first_token is None:
            times.first_token = now
            self._metrics.time_to_first_token_seconds.observe(now - times.arrived)
        self._last_token_at[index] = now

    def _close(self, index: int, reason: FinishReason, now: float) -> None:
        last_token_at = self._last_token_at.pop(index)
        if last_token_at is not None:
            self.times.last_token = max(last_token_at, self.times.last_token or last_token_at)
        if self.finish_reason is None or _SEVERITY.index(reason) > _SEVERITY.index(self.finish_reason):
            self.finish_reason = reason
        if not self._last_token_at:
            self.times.finished = now
            self._metrics.finished(self, self.finish_reason)
            self._on_end(self)
            self._wake()

    def _add(self, index: int, added: Added) -> None:
        pending = self._pending
        if index in pending:
            merged = pending[index] = SequenceDelta.of(pending[index])
            merged.merge(added)
            return
        pending[index] = added
        if len(pending) == 1:
            if self._on_news is not None:
                self._on_news(self)
            elif not self._wakes_at_end:
                self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
