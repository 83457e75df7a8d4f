"""/metrics."""

from __future__ import annotations

from aiohttp import web

from oneloop.api.metrics import CONTENT_TYPE, exposition
from oneloop.api.state import STATE, TEXT


async def metrics(request: web.Request) -> web.StreamResponse:
    """Everything measured, as Prometheus text."""
    running = request.app.get(STATE)
    body = await exposition(None if running is None else running.engine, request.app[TEXT].metrics)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
