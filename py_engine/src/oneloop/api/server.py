"""The listening server: connections with limits, one form of error down to the HTTP parser, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from aiohttp import web

from oneloop.api.app import create_app, one_exit
from oneloop.api.errors import INTERNAL_MESSAGE, ApiError, ErrorKind, bad_request, error_response
from oneloop.api.limits import HEADER_TIMEOUT_S
from oneloop.api.listener import Listener

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest

    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine

log = logging.getLogger(__name__)

LINGERING_S = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client gets to see the refusal."""
LAST_WORDS_S = 1.0
"""After the drain: time for the last events to reach their clients."""
_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 15, 15, 3
_UNACKNOWLEDGED_MS = 60_000


class Connection(web.RequestHandler):
    """One client's connection. What HTTP itself refuses gets our error body; a peer that vanished is noticed."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the kernel find out, within a minute, that the other side is gone without a word."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)

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


async def run_server(
    engine: AsyncEngine, config: ServerConfig, sock: socket.socket, stop: asyncio.Event
) -> None:
    """Serve a started engine on a bound socket until `stop` is set; then end in order.

    Order: stop listening; the engine refuses new requests (503) and drains for `config.shutdown_timeout` seconds; what
    still runs is ended with an error event; connections are closed. Returns when all of it is done.
    """
    runner = web.AppRunner(create_app(engine, config), access_log=None, handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None
    server.request_handler = one_exit(server.request_handler)  # type: ignore[assignment]  # an app's are Requests
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(
            server,
            loop=loop,
            keepalive_timeout=HEADER_TIMEOUT_S,
            lingering_time=LINGERING_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # as AppRunner takes it: no access log
        )

    listener = Listener(sock, connection)
    try:
        await stop.wait()
        listener.close()
        server.pre_shutdown()
        await engine.shutdown(drain_timeout=config.shutdown_timeout)
    finally:
        listener.close()
        await server.shutdown(LAST_WORDS_S)
        await runner.cleanup()
