"""One client's connection: whose turn it is, bounds on the framing, and one form of error down to the HTTP parser."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.tcp_helpers import tcp_nodelay
from aiohttp.web_protocol import _ErrInfo

from oneloop.api.errors import INTERNAL_MESSAGE, ApiError, ErrorKind, bad_request, error_response
from oneloop.api.limits import MAX_HEAD_BYTES, MAX_WAITING_REQUESTS
from oneloop.api.peers import HalfClosedPeer

if TYPE_CHECKING:
    from typing import Any

    from aiohttp.streams import StreamReader
    from aiohttp.web_request import BaseRequest

    from oneloop.api.express import ExpressLane, ExpressReply

log = logging.getLogger(__name__)

_READ_AT_ONCE = 32 << 10
"""Bytes that are parsed in a turn of the loop: 5 ms where they are chunks of a byte each. asyncio reads 256 KiB."""


class Connection(web.RequestHandler):
    """aiohttp's connection with our error body. A peer that vanished is noticed, one that is only quiet is answered."""

    __slots__ = (
        "_body", "_express", "_is_deaf", "_lane", "_looking", "_num_body_bytes", "_num_framing_bytes", "_num_heads",
        "_owed",
    )  # fmt: skip

    def __init__(self, manager: web.Server, *, lane: ExpressLane, **options: Any) -> None:
        """options: aiohttp's."""
        super().__init__(manager, **options)
        self._lane = lane
        self._express: ExpressReply | None = None
        """The reply that is on its way without aiohttp's task, which waits meanwhile."""
        self._max_msg_queue_size = MAX_WAITING_REQUESTS
        self._msg_queue_resume_size = MAX_WAITING_REQUESTS // 2
        self._num_heads = 0
        """How many have ended."""
        self._body: StreamReader = EMPTY_PAYLOAD
        """Of the last head that has ended, while it arrives."""
        self._num_body_bytes = 0
        """Of it."""
        self._num_framing_bytes = 0
        """Since the last that were a body's: of the next head, of a chunk's extensions, of trailers."""
        self._is_deaf = False
        """Whether the rest is of no interest: the client has sent too much."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As aiohttp's, but its task begins with the first request that needs it."""
        self._owed: tuple[Any, Any] | None = None
        """The last request (message, body) of which not all is answered."""
        self._looking: HalfClosedPeer | None = None
        """Set once the client has ended its side."""
        transport.max_size = _READ_AT_ONCE  # type: ignore[attr-defined]  # of asyncio's transports of sockets
        assert self._manager is not None
        self.transport = cast("asyncio.Transport", transport)
        # Or an event waits until the client has acknowledged the one before, which takes that 40 ms. asyncio does it by
        # itself only where the listening socket was made with its protocol's number.
        tcp_nodelay(self.transport, True)
        self._manager.connection_made(self, self.transport)
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Nothing is asked: the connection is closed when that stays so."""
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )

    def _process_keepalive(self) -> None:
        """As aiohttp's, which closes where its task waits; here it may never have been needed."""
        super()._process_keepalive()
        if self._keepalive and self._keepalive_handle is None and self._task_handler is None:
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is owed any more."""
        self._owed = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None  # it refers to us: nothing is left to the collector
        super().connection_lost(exc)
        if self._express is not None:
            self._express.lost()

    def data_received(self, data: bytes) -> None:
        """As aiohttp's, which queues whole heads; whose turn it is is decided here."""
        if self._is_deaf:
            return
        waiter, self._waiter = self._waiter, None
        super().data_received(data)
        self._waiter = waiter
        if self._request_count != self._num_heads:
            self._head_ended()
        elif self._body.total_bytes != self._num_body_bytes:
            self._num_body_bytes, self._num_framing_bytes = self._body.total_bytes, 0
        else:
            self._num_framing_bytes += len(data)
            if self._num_framing_bytes > MAX_HEAD_BYTES:
                self._refuse_framing()
        if self._messages:
            self._owed = self._messages[-1]
            if not self._is_answering:
                self._answer_next()

    def _head_ended(self) -> None:
        """One or several have been queued; what arrives now is the last one's body, or the next head."""
        self._num_heads, self._num_framing_bytes = self._request_count, 0
        before, self._body = self._body, EMPTY_PAYLOAD
        if self._messages:
            message, body = self._messages[-1]
            if not isinstance(message, RawRequestMessage):
                _cut(before)
            elif not body.is_eof():
                self._body = body
        self._num_body_bytes = self._body.total_bytes

    def _refuse_framing(self) -> None:
        """As what the parser refuses."""
        self._is_deaf = True
        _cut(self._body)
        error = LineTooLong(b"", MAX_HEAD_BYTES)
        self._messages.append((_ErrInfo(status=error.code, exc=error, message=error.message), EMPTY_PAYLOAD))

    @property
    def _is_answering(self) -> bool:
        """Whether the next request has to wait: for a reply, or for aiohttp's task, which has it already."""
        if self._express is not None:
            return True
        return self._task_handler is not None and (self._waiter is None or self._waiter.done())

    def _answer_next(self) -> None:
        """Begin the next reply: on the express lane, or by aiohttp's task."""
        message, body = self._messages[0]
        is_whole = body.total_bytes and body.is_eof()
        if is_whole and isinstance(message, RawRequestMessage) and self._lane.admits(message):
            # Looked at, not read: aiohttp's task finds it as it is, and reading would set the parser going again.
            self._express = self._lane.begin(self, message, b"".join(body._buffer))
            if self._express is not None:
                self._take_message()
                return
        if self._waiter is not None:
            self._waiter.set_result(None)
        else:
            self._task_handler = self._loop.create_task(self.start())

    def _take_message(self) -> None:
        """The head of the queue is being answered. As aiohttp's task takes it."""
        self._messages.popleft()
        self._keepalive = False  # until it is answered
        self._request_in_progress = True
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()

    def reply_over(self) -> None:
        """From the express lane: its reply has ended, or there is nobody to tell. As aiohttp's task goes on."""
        self._express = None
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        self._all_answered()
        transport = self.transport
        if transport is None:
            return
        if self._close or self._force_close:
            transport.close()
            return
        self._keepalive = True
        self._watch_idle()
        if self._messages and not self._is_answering:
            self._answer_next()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp never keeps one
        """The client sends no more. True keeps the connection until what it has asked for is answered.

        A request that is not whole is none, and a client of HTTP/1.0 cannot be probed: proxies that speak it to
        servers tell in this way that their own client has left.
        """
        if self._owed is None:
            return False
        message, body = self._owed
        if not body.is_eof() or (isinstance(message, RawRequestMessage) and message.version < HttpVersion11):
            return False
        if self._looking is None and self.transport is not None:
            self._looking = HalfClosedPeer(self.transport, self._is_silent)
        return True

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp's: the end of a reply. A connection that brings no more requests ends with its last one."""
        finished = await super().finish_response(request, resp, start_time)
        if request.content.exception() is not None:
            request.content.feed_eof()  # aiohttp would read on, and log what it finds
        self._all_answered()
        return finished

    def _all_answered(self) -> None:
        """Nothing is owed but what waits. A client that sends no more has nothing to wait for once it has its last."""
        self._owed = self._messages[-1] if self._messages else None
        if self._owed is None and self._looking is not None:
            self.close()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply to what never reached a handler: malformed HTTP. Nothing of the message is repeated or logged."""
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun; only closing is left")
        if 400 <= status < 500:
            log.debug("refused malformed HTTP: %s", type(exc).__name__)
            error = bad_request(None, "The request is not valid HTTP, or its headers are too large.")
        else:
            log.error("a connection failed", exc_info=exc)
            error = ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE)
        return error_response(error, close=True)

    def _is_silent(self) -> bool:
        """Whether a reply is awaited of which no byte is on its way."""
        if self._express is not None:
            return not self._express.has_begun
        request = self._current_request
        return request is not None and request.writer.output_size == 0


def _cut(body: StreamReader) -> None:
    """What follows is no HTTP, so a body that was still to come never ends. aiohttp does not tell who reads it."""
    if not body.is_eof() and body.exception() is None:
        body.set_exception(web.RequestPayloadError())
