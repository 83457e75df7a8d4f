"""/metrics."""

from __future__ import annotations

from aiohttp import web

from oneloop.api.metrics import CONTENT_TYPE, exposition
from oneloop.api.state import STATE


async def metrics(request: web.Request) -> web.StreamResponse:
    """Everything measured, as Prometheus text."""
    state = request.app[STATE]
    body = await exposition(state.engine, state.metrics)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
