"""One client: sends the sessions of a job when they are due and notes what comes back."""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import orjson

from oneloop_bench.load.checks import find_problems
from oneloop_bench.load.connection import CONNECT_LIMIT_S, Endpoint, Pool, request
from oneloop_bench.load.record import Record
from oneloop_bench.load.reply import StreamReply, WholeReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from oneloop_bench.load.connection import Connection
    from oneloop_bench.load.workload import Job, Session

NOT_SENT = "not sent: an earlier turn failed"


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection in the block: a client's pause would be told as the server's latency."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A request that waits to be sent."""

    body: dict[str, Any]
    data: bytes


class Client:
    """Runs one job. Its requests are made when it is, not while it runs (but those of later turns)."""

    def __init__(self, job: Job, on_done: Callable[[], None]) -> None:
        """on_done: called after each request."""
        self._job = job
        self._asking = job.asking
        self._on_done = on_done
        self._endpoint = Endpoint.from_url(job.url, insecure=job.insecure)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **self._asking.headers}
        self._head = self._endpoint.head("POST", self._asking.path, headers)
        self._first = [self._ready(session, 0, self._said(session)) for session in job.sessions]
        self._records: list[Record] = []

    @property
    def records(self) -> list[Record]:
        """Of all requests that have ended, in the order of their indices."""
        return sorted((record for record in self._records if record.end), key=lambda record: record.index)

    async def run(self, begin: float) -> None:
        """All sessions; begin: when the run starts (perf_counter). When cancelled, what has ended is in `records`."""
        job, slots = self._job, None
        if job.max_concurrency is not None:
            slots = asyncio.Semaphore(job.max_concurrency)
        self._pool = Pool(self._endpoint, min(CONNECT_LIMIT_S, self._asking.timeout_s))
        try:
            async with asyncio.TaskGroup() as group:
                for place, start in enumerate(job.starts):
                    if (wait_s := begin + start - perf_counter()) > 0:
                        await asyncio.sleep(wait_s)
                    if slots is not None:
                        await slots.acquire()
                    group.create_task(self._run_session(place, begin + start, slots))
        finally:
            self._pool.close()

    async def _run_session(self, place: int, due: float, slots: asyncio.Semaphore | None) -> None:
        session, number = self._job.sessions[place], self._job.numbers[place]
        ready, said = self._first[place], self._said(session)
        for turn_number, turn in enumerate(session.turns):
            record = Record(number + turn_number, due, expected_len=turn.input_len)
            self._records.append(record)
            if turn_number:
                ready = self._ready(session, turn_number, said)
            await self._ask(ready, record, keeps_text=turn_number + 1 < len(session.turns))
            self._on_done()
            if not record.is_complete:
                self._give_up(record, session, number, turn_number)
                break
            if turn_number + 1 < len(session.turns):
                said = self._add(ready, record)
                pause_s = session.think_s[turn_number] if session.think_s else 0.0
                due = record.end + pause_s
                if pause_s:
                    await asyncio.sleep(pause_s)
        if slots is not None:
            slots.release()

    def _said(self, session: Session) -> str | list[dict[str, Any]] | None:
        """What stands before a session's first turn."""
        if session.system is None:
            return None
        return [{"role": "system", "content": session.system}] if self._asking.is_chat else session.system

    def _add(self, ready: _Ready, record: Record) -> str | list[dict[str, Any]]:
        """What was said, with this turn and its reply."""
        if self._asking.is_chat:
            messages: list[dict[str, Any]] = ready.body["messages"]
            return [*messages, {"role": "assistant", "content": record.text}]
        return f"{ready.body['prompt']}{record.text}"

    def _ready(self, session: Session, turn_number: int, said: str | list[dict[str, Any]] | None) -> _Ready:
        body = self._asking.body(session.turns[turn_number], said)
        return _Ready(body, request(self._head, orjson.dumps(body)))

    def _give_up(self, failed: Record, session: Session, number: int, turn_number: int) -> None:
        """The turns after one that failed are failures too."""
        for later in range(turn_number + 1, len(session.turns)):
            at = failed.end
            self._records.append(Record(number + later, at, sent=at, end=at, error=NOT_SENT))
            self._on_done()

    async def _ask(self, ready: _Ready, record: Record, *, keeps_text: bool) -> None:
        """Send, wait for the end, judge."""
        record.sent = perf_counter()
        try:
            reply = await self._reply(ready, record, keeps_text)
        except (OSError, TimeoutError, UnicodeError) as error:
            record.end, record.error = perf_counter(), f"no connection: {str(error) or type(error).__name__}"
            return
        record.end, record.status, record.error = reply.end, reply.status, reply.error
        if usage := reply.seen.usage:
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
        if record.error is None:
            record.problems = find_problems(reply.seen, self._asking.expected(ready.body))
            record.text = reply.text if keeps_text else None

    async def _reply(self, ready: _Ready, record: Record, keeps_text: bool) -> StreamReply | WholeReply:
        """The reply, once it has ended. OSError or TimeoutError when nobody can be asked.

        An old connection that was closed before anything came back says nothing of this request: it is sent anew.
        """
        connection = await self._pool.take()
        if connection.was_used:
            reply = await self._exchange(connection, ready, record, keeps_text)
            if reply.error is None or connection.has_answered or not connection.was_lost:
                return reply
            connection = await self._pool.take(fresh=True)
        return await self._exchange(connection, ready, record, keeps_text)

    async def _exchange(
        self, connection: Connection, ready: _Ready, record: Record, keeps_text: bool
    ) -> StreamReply | WholeReply:
        """Send over this connection; its reply, once it has ended."""
        loop, asking = asyncio.get_running_loop(), self._asking
        ended = loop.create_future()

        def done() -> None:
            if not ended.done():
                ended.set_result(None)

        reply: StreamReply | WholeReply
        if asking.streams:
            reply = StreamReply(record.times, done, is_chat=asking.is_chat, keeps_text=keeps_text)
        else:
            reply = WholeReply(done, is_chat=asking.is_chat)
        connection.send(ready.data, reply)
        timer = loop.call_later(asking.timeout_s, connection.abort, f"no end within {asking.timeout_s:g} s")
        try:
            await ended
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            timer.cancel()
        self._pool.give(connection)
        return reply
