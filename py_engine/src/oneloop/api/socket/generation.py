"""One generation of a socket: prepared as its endpoint does, told as deltas, held by credit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oneloop.api.errors import ApiError, ErrorKind, told
from oneloop.api.handlers.generation import abort_all, check_delta, submit_all
from oneloop.api.handlers.streaming import begin_echo, nothing_generated
from oneloop.api.replies import new_request_id
from oneloop.api.socket import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from oneloop.api.encoder import EventEncoder
    from oneloop.api.handlers.generation import Job, Prepare
    from oneloop.api.socket.messages import Open
    from oneloop.api.state import ApiState

_EVENT_START, _EVENT_END = b"data: ", b"\n\n"


class Generation:
    """Runs until everything of it was sent, it was cancelled, or it has failed.

    What waits for credit is what the streams merge: one delta per choice, so never more than the reply's own text.
    """

    def __init__(
        self,
        state: ApiState,
        asked: Open,
        prepare: Prepare,
        send: Callable[[str], Awaitable[None]],
        retire: Callable[[], None],
    ) -> None:
        """send: a message, when the socket has taken enough of what went before. retire: its id is free again."""
        self.id = asked.id
        self._state = state
        self._prepare = prepare
        self._body: dict[str, object] = {**asked.body, "stream": True}
        self._send = send
        self._retire = retire
        self._credit = asked.credit
        self._may_go_on = asyncio.Event()
        self._has_news = asyncio.Event()
        self._is_cancelled = False
        self._job: Job | None = None
        self._request_id = new_request_id()

    def grant(self, num_deltas: int) -> None:
        """So many more deltas may be sent; nothing changes where they are not counted."""
        if self._credit is not None:
            self._credit = min(self._credit + num_deltas, messages.MAX_CREDIT)
            self._may_go_on.set()

    def cancel(self) -> None:
        """End it; what was generated so far is still told, as far as there is credit."""
        self._is_cancelled = True
        self._may_go_on.set()
        if self._job is not None:
            abort_all(self._job.streams)

    async def run(self) -> None:
        """All of it. ConnectionError when the client is gone; every other error is told to the client."""
        try:
            job = await self._open()
            await begin_echo(job, job.streams)
            encoder = job.make_encoder()
            if job.streams:
                await self._tell_all(job, encoder)
            else:
                await self._tell(nothing_generated(encoder))
            self._retire()
            await self._send(messages.done(self.id, job.usage, cancelled=self._is_cancelled))
        except ConnectionError:
            raise
        except Exception as error:
            self._retire()
            await self._send(messages.failed(self.id, told(error, self._request_id)))
        finally:
            self._retire()
            if self._job is not None:
                abort_all(self._job.streams)

    async def _open(self) -> Job:
        with self._state.arrivals.one():
            job = await self._prepare(self._state, self._body, self._request_id, self._rename)
            self._job = job
            self._body = {}
            await submit_all(self._state, job.streams, job, self._request_id)
        if self._is_cancelled:
            abort_all(job.streams)
        ignored = job.headers.get("X-Oneloop-Ignored")
        await self._send(messages.opened(self.id, self._request_id, ignored))
        return job

    def _rename(self, request_id: str) -> None:
        self._request_id = request_id

    async def _tell_all(self, job: Job, encoder: EventEncoder) -> None:
        """Everything the streams bring. ApiError when a sequence failed, or no credit comes."""
        num_open, n = encoder.num_choices, encoder.num_choices // len(job.streams)
        for stream in job.streams:
            stream.call_on_news(lambda _: self._has_news.set())
        try:
            while num_open:
                await self._has_news.wait()
                await self._await_credit()
                self._has_news.clear()
                events = []
                for prompt, stream in enumerate(job.streams):
                    added = stream.take()
                    self._count(job)
                    for delta in added:
                        check_delta(self._state, stream, delta)
                        num_open -= delta.finish_reason is not None
                        events.append(encoder.encode(prompt * n + delta.index, delta))
                await self._tell(b"".join(events))
        finally:
            for stream in job.streams:
                stream.call_on_news(None)

    async def _tell(self, events: bytes) -> None:
        """A message for each event."""
        for event in events.split(_EVENT_END):
            if not event:
                continue
            await self._await_credit()
            if self._credit:
                self._credit -= 1
            await self._send(messages.delta(self.id, event.removeprefix(_EVENT_START)))

    async def _await_credit(self) -> None:
        """Wait until a delta may be sent; the rest of a cancelled one may be. ApiError where it takes too long."""
        while self._credit == 0 and not self._is_cancelled:
            self._may_go_on.clear()
            limit = self._state.config.write_timeout_s
            try:
                async with asyncio.timeout(limit):
                    await self._may_go_on.wait()
            except TimeoutError:
                message = f"No credit was granted for {limit:g} seconds; the generation has ended."
                raise ApiError(ErrorKind.TIMEOUT, message) from None

    @staticmethod
    def _count(job: Job) -> None:
        job.usage.completion_tokens = sum(stream.num_generated_tokens for stream in job.streams)
        job.usage.cached_tokens = sum(stream.num_cached_tokens for stream in job.streams)
