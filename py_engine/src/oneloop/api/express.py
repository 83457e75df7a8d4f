"""The express lane: streamed replies without aiohttp's machinery, for requests of the form that clients send.

Its request, router, middlewares, tasks and response take longer than what a short request is about, and while a burst
of requests is taken in the steps are launched late. So who asks for a stream by HTTP/1.1 with keep-alive, its body at
hand, is answered here: same parser, same preparation by the route, same bytes. Everything else goes aiohttp's way, and
so does all that is refused before the route has seen it.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, hdrs

from oneloop.api.body import NOT_COUNTED
from oneloop.api.errors import SERVER_NAME, ApiError, error_bytes, told
from oneloop.api.framing import framing_fault
from oneloop.api.handlers.chat import prepare_chat
from oneloop.api.handlers.completions import prepare_completion
from oneloop.api.handlers.generation import abort_all, submit_all
from oneloop.api.handlers.streaming import begin_echo, nothing_generated, told_under_way
from oneloop.api.metrics import CLIENT_GONE
from oneloop.api.protocol.sampling import safe_request_id
from oneloop.api.protocol.strict_json import decode_object
from oneloop.api.replies import new_request_id
from oneloop.api.sender import StreamSender
from oneloop.api.stream import EVENT_HEADERS, PlainWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.http import RawRequestMessage

    from oneloop.api.auth import KeyCheck
    from oneloop.api.connection import Connection
    from oneloop.api.handlers.generation import Job, Prepare
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream

_ROUTES: Mapping[str, Prepare] = {
    "/v1/completions": prepare_completion,
    "/v1/chat/completions": prepare_chat,
}
_MEDIA_TYPES = frozenset({"application/json", "application/json; charset=utf-8"})


class ExpressLane:
    """Decides who goes this way. One per application."""

    __slots__ = ("_keys", "_state")

    def __init__(self, state: ApiState, keys: KeyCheck) -> None:
        self._state = state
        self._keys = keys

    def admits(self, message: RawRequestMessage) -> bool:
        """Whether a head is of the common form, and has the key where one is needed."""
        headers = message.headers
        return (
            message.path in _ROUTES
            and message.method == "POST"
            and message.version == HttpVersion11
            and not message.should_close
            and not message.upgrade
            and headers.get(hdrs.CONTENT_TYPE) in _MEDIA_TYPES
            and hdrs.EXPECT not in headers
            and hdrs.CONTENT_ENCODING not in headers
            and hdrs.TRANSFER_ENCODING not in headers
            and framing_fault(message.version, headers) is None
            and self._keys.admits(headers.getall(hdrs.AUTHORIZATION, []), headers.getall("X-Api-Key", []))
        )

    def begin(self, connection: Connection, message: RawRequestMessage, body: bytes) -> ExpressReply | None:
        """The reply to a whole request that `admits` has let in. None: it asks for no stream, or is to be refused."""
        if b'"stream"' not in body or len(body) > min(self._state.limits.max_body_bytes, NOT_COUNTED):
            return None
        try:
            members = decode_object(body)
        except ApiError:
            return None
        if members.get("stream") is not True:
            return None
        request_id = safe_request_id(message.headers.get("X-Request-Id")) or new_request_id()
        return ExpressReply(self._state, connection, message.path, request_id, members)


class ExpressReply:
    """A streamed reply. It has a task until its prompts are queued, and while its reader is slow.

    Its connection is told when it is over (`reply_over`), and tells it when the client is gone (`lost`).
    """

    __slots__ = (
        "_began", "_connection", "_encoder", "_is_over", "_job", "_request_id", "_route", "_sender", "_state",
        "_streams", "_task", "_writer",
    )  # fmt: skip

    def __init__(
        self,
        state: ApiState,
        connection: Connection,
        route: str,
        request_id: str,
        members: dict[str, object],
    ) -> None:
        """members: of the body."""
        self._began = time.monotonic()
        self._state = state
        self._connection = connection
        self._route = route
        self._request_id = request_id
        self._streams: list[RequestStream] = []
        self._sender: StreamSender | None = None
        self._writer: PlainWriter | None = None
        self._job: Job | None = None
        self._is_over = False
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._open(members))

    @property
    def has_begun(self) -> bool:
        """Whether bytes of it are on their way."""
        return self._writer is not None and self._writer.started

    def lost(self) -> None:
        """The client is gone."""
        if self._task is not None:
            self._task.cancel()
        self._over(CLIENT_GONE)

    async def _open(self, members: dict[str, object]) -> None:
        """Prepare and queue; from then on the outbox has the turn."""
        state = self._state
        try:
            with state.arrivals.one():
                job = await _ROUTES[self._route](state, members, self._request_id, self._rename)
                await submit_all(state, self._streams, job, self._request_id)
            await begin_echo(job, self._streams)
            self._task = None
            self._begin(job)
        except Exception as error:
            self._fail(error)

    def _rename(self, request_id: str) -> None:
        self._request_id = request_id

    def _begin(self, job: Job) -> None:
        state = self._state
        head = _stream_head(self._request_id, job.headers)
        self._job, self._encoder = job, job.make_encoder()
        self._writer = PlainWriter(self._connection, head, state.config.write_timeout_s)
        if not self._streams:
            self._end(nothing_generated(self._encoder))
            return
        self._sender = StreamSender(
            state, self._writer, self._streams, self._encoder, job.usage, self._take_turn
        )
        self._sender.leave_to_outbox()

    def _take_turn(self, events: bytes, fault: Exception | None) -> None:
        """From the sender: the first events or the last ones, a socket that takes no more, or a fault."""
        assert self._sender is not None
        assert self._writer is not None
        try:
            if fault is not None:
                self._fail(fault)
            elif self._sender.all_ended:
                self._sender.count_usage()
                self._end(events)
            elif events and self._writer.write(events):
                self._sender.leave_to_outbox()
            else:
                self._task = asyncio.get_running_loop().create_task(self._wait_writable())
        except Exception as error:
            self._fail(error)

    async def _wait_writable(self) -> None:
        """A slow reader: nothing is taken meanwhile."""
        assert self._sender is not None
        assert self._writer is not None
        try:
            await self._writer.wait_writable()
            self._task = None
            self._sender.leave_to_outbox()
        except Exception as error:
            self._fail(error)

    def _end(self, events: bytes) -> None:
        """The last events. ConnectionError when the client is gone."""
        assert self._writer is not None
        assert self._job is not None
        self._ended(self._writer.end(events + self._encoder.closing()))

    def _ended(self, taken: bool) -> None:
        if taken:
            self._over(HTTPStatus.OK)
        else:
            self._task = asyncio.get_running_loop().create_task(self._wait_taken())

    async def _wait_taken(self) -> None:
        """A slow reader has the end to read."""
        assert self._writer is not None
        try:
            await self._writer.wait_writable()
            self._over(HTTPStatus.OK)
        except ConnectionError:
            self._leave()

    def _fail(self, error: Exception) -> None:
        """Tell the client as far as it can be told: by the status, by an event, or not at all."""
        if self._is_over:
            return
        try:
            if isinstance(error, ConnectionError):
                raise error
            if self._writer is not None and self._writer.started:
                self._ended(self._writer.end(self._encoder.failure(told_under_way(error, self._request_id))))
                return
            known = told(error, self._request_id)
            transport = self._connection.transport
            if transport is not None:
                transport.write(_error_reply(known, self._request_id))
            if known.ends_connection:
                self._connection.close()
            self._over(known.kind.status)
        except ConnectionError:
            self._leave()

    def _leave(self) -> None:
        """Nobody is there to be told."""
        self._connection.force_close()  # first, so that nothing which waits behind it is begun
        self._over(CLIENT_GONE)

    def _over(self, status: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        abort_all(self._streams)
        if self._sender is not None:
            self._sender.stop()
        # Nothing is left to the collector: sender and streams go with their last reference.
        self._task = self._sender = self._writer = self._job = None
        self._streams = []
        self._state.metrics.observe(self._route, "POST", status, time.monotonic() - self._began)
        self._connection.reply_over()


_STREAM_HEAD = "".join(
    ["HTTP/1.1 200 OK\r\n", *(f"{name}: {value}\r\n" for name, value in EVENT_HEADERS.items())]
)


def _stream_head(request_id: str, headers: Mapping[str, str]) -> bytes:
    """Status and headers of a stream. headers: beside those of every stream."""
    own = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{_STREAM_HEAD}{own}{_common(request_id)}Transfer-Encoding: chunked\r\n\r\n".encode("latin-1")


def _error_reply(error: ApiError, request_id: str) -> bytes:
    """A whole reply."""
    status, body = HTTPStatus(error.kind.status), error_bytes(error)
    own = "".join([f"{name}: {value}\r\n" for name, value in error.headers.items()])
    if error.ends_connection:
        own += "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n{own}{_common(request_id)}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


def _common(request_id: str) -> str:
    """Headers of every reply."""
    return f"Server: {SERVER_NAME}\r\nX-Request-Id: {request_id}\r\nDate: {_date(int(time.time()))}\r\n"


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """A Unix time as HTTP writes it."""
    return formatdate(second, usegmt=True)
