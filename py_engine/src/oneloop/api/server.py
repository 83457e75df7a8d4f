"""The listening server: connections with limits, and an orderly end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from oneloop.api.app import create_app, one_exit
from oneloop.api.auth import KeyCheck
from oneloop.api.connection import Connection
from oneloop.api.express import ExpressLane
from oneloop.api.limits import HEADER_TIMEOUT_S
from oneloop.api.listener import Listener
from oneloop.api.state import STATE
from oneloop.engine.event_loop import EVENTS_PER_TURN

if TYPE_CHECKING:
    import socket

    from oneloop.config import ServerConfig
    from oneloop.engine.async_engine import AsyncEngine

LINGERING_S = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client gets to see the refusal."""
LAST_WORDS_S = 1.0
"""After the drain: time for the last events to reach their clients."""
_TURNS_TO_CONNECT = 4
"""From accepting a connection to the first look at it."""
_CONNECTIONS_PER_TURN = EVENTS_PER_TURN - 1
"""The other event is the engine's."""


async def run_server(
    engine: AsyncEngine, config: ServerConfig, sock: socket.socket, stop: asyncio.Event
) -> None:
    """Serve a started engine on a bound socket (see peers.watch_peers) until `stop` is set; then end in order.

    Order: stop listening; take what has arrived, and queue it; the engine drains until `config.shutdown_timeout`
    seconds are over, and who asks by a connection that was kept gets 503 and its end; what still runs is ended with an
    error event; connections are closed. Returns when all of it is done.
    """
    app = create_app(engine, config)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    server = runner.server
    assert server is not None
    server.request_handler = one_exit(server.request_handler)  # type: ignore[assignment]  # an app's are Requests
    lane = ExpressLane(app[STATE], KeyCheck(config.api_key))
    loop = asyncio.get_running_loop()

    def connection() -> Connection:
        return Connection(
            server,
            lane=lane,
            loop=loop,
            keepalive_timeout=HEADER_TIMEOUT_S,
            lingering_time=LINGERING_S,
            auto_decompress=False,
            access_log=None,  # as AppRunner takes it: no access log
        )

    listener = Listener(sock, connection)
    try:
        await stop.wait()
        listener.close()
        ends = loop.time() + config.shutdown_timeout
        await _let_arrive(server)
        await app[STATE].arrivals.close(config.shutdown_timeout)
        await engine.shutdown(drain_timeout=max(0.0, ends - loop.time()))
        server.pre_shutdown()  # not before: a kept connection that just ends is no answer to who is asking
    finally:
        listener.close()
        await server.shutdown(LAST_WORDS_S)
        await runner.cleanup()


async def _let_arrive(server: web.Server) -> None:
    """Turns of the loop until it has looked at every connection: who has asked already is not taken for idle."""
    for _ in range(_TURNS_TO_CONNECT):
        await asyncio.sleep(0)
    for _ in range(len(server.connections) // _CONNECTIONS_PER_TURN + 1):
        await asyncio.sleep(0)
