"""One client's connection: one form of error down to the HTTP parser, and an eye on whether the client is still there.

A client may end its side once it has asked (`shutdown(SHUT_WR)`) and still gets its reply. What it sends is then the
same as what one sends that has left, so who ends its side is probed: only a client that has left answers with RST.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage

from oneloop.api.errors import INTERNAL_MESSAGE, ApiError, ErrorKind, bad_request, error_response

if TYPE_CHECKING:
    from typing import Any

    from aiohttp.web_request import BaseRequest

log = logging.getLogger(__name__)

_KEEPALIVE_AFTER_S, _KEEPALIVE_EVERY_S, _NUM_KEEPALIVES = 15, 15, 3
_UNACKNOWLEDGED_S = 60.0
_MAX_MS = (1 << 31) - 1

_READ_AT_ONCE = 32 << 10
"""Bytes that are parsed in a turn of the loop: 5 ms where they are chunks of a byte each. asyncio reads 256 KiB."""

_LOOK_EVERY_S = 0.1
"""How often it is looked whether a client that sends no more is still there."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Goes before any reply without being one (RFC 9110, 15.2). Once a reply has begun, its own bytes are the probe."""
_NUM_PROBES = 4
"""Several, for a proxy in between that passes on what it hears by its next write. Some clients take no more than 5."""
_TCP_CLOSE = 7
"""State of a Linux socket after RST: the first byte of TCP_INFO."""


class Connection(web.RequestHandler):
    """aiohttp's connection with our error body. A peer that vanished is noticed, one that is only quiet is answered."""

    __slots__ = ("_looking", "_num_probes", "_owed", "_unacknowledged_ms")

    def __init__(self, manager: web.Server, *, write_timeout_s: float, **options: Any) -> None:
        """write_timeout_s: a client may read nothing for so long. options: aiohttp's."""
        super().__init__(manager, **options)
        # For the kernel a client that reads nothing is one that acknowledges nothing.
        self._unacknowledged_ms = min(round(max(_UNACKNOWLEDGED_S, write_timeout_s) * 1e3), _MAX_MS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the kernel find out that the other side is gone without a word."""
        self._owed: tuple[Any, Any] | None = None
        """The last request (message, body) of which not all is answered."""
        self._looking: asyncio.TimerHandle | None = None
        """Set once the client has ended its side."""
        self._num_probes = _NUM_PROBES
        transport.max_size = _READ_AT_ONCE  # type: ignore[attr-defined]  # of asyncio's transports of sockets
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_AFTER_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unacknowledged_ms)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is owed any more."""
        self._owed = None
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As aiohttp's, which queues whole heads."""
        super().data_received(data)
        if self._messages:
            self._owed = self._messages[-1]

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
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_EVERY_S, self._look)
        return True

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp's: the end of a reply. A connection that brings no more requests ends with its last one."""
        finished = await super().finish_response(request, resp, start_time)
        self._owed = self._messages[-1] if self._messages else None
        if self._owed is None and self._looking is not None:
            self.close()
        return finished

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

    def _look(self) -> None:
        """Whether the client that sends no more has left: then its requests end as with any other that leaves."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        request = self._current_request
        if self._num_probes and request is not None and request.writer.output_size == 0:
            self._num_probes -= 1
            transport.write(_PROBE)
        sock = transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            transport.abort()
        else:
            self._looking = self._loop.call_later(_LOOK_EVERY_S, self._look)
