"""/health and /ping: whether requests are served now. Costs no engine work."""

from __future__ import annotations

from aiohttp import web

from oneloop.api.errors import ApiError, ErrorKind
from oneloop.api.state import STATE


async def health(request: web.Request) -> web.StreamResponse:
    """200 and an empty body, or 503 once the engine is dead, stalled or draining, or soon will be."""
    state = request.app[STATE]
    found = state.engine.health()
    if not found.ok:
        raise ApiError(ErrorKind.UNAVAILABLE, f"The engine is {found.state}.")
    if state.arrivals.is_closed:
        raise ApiError(ErrorKind.UNAVAILABLE, "The engine is draining.")
    return web.Response()
