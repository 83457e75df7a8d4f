"""/debug/scheduler, /debug/experts and /debug/stacks: the live view.

Only with --enable-debug-endpoints, and behind the key.
"""

from __future__ import annotations

import secrets

from aiohttp import web

from oneloop.api.debug_page import page
from oneloop.api.errors import bad_request
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.state import STATE
from oneloop.engine.stacks import describe_stacks

_NOT_KEPT = {"Cache-Control": "no-store"}


async def scheduler(request: web.Request) -> web.StreamResponse:
    """JSON, or a page that shows it: by `?format=json|html`, else by the Accept header."""
    wanted = request.query.get("format")
    if wanted is None:
        wanted = "html" if "text/html" in request.headers.get("Accept", "") else "json"
    match wanted:
        case "json":
            engine = request.app[STATE].engine
            reply = json_reply({"state": engine.health().state, **engine.scheduler_view()})
            reply.headers.update(_NOT_KEPT)
            return reply
        case "html":
            nonce = secrets.token_urlsafe(16)
            policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
            policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            headers = {"Content-Security-Policy": policy, **_NOT_KEPT}
            return web.Response(text=page(nonce), content_type="text/html", charset="utf-8", headers=headers)
        case _:
            raise bad_request("format", "format is json or html")


async def experts(request: web.Request) -> web.StreamResponse:
    """How many tokens each expert of each sparse layer was sent: what is counted since the start."""
    counts = await request.app[STATE].engine.expert_counts()
    layers = [{"layer": layer, "tokens": tokens} for layer, tokens in (counts or {}).items()]
    reply = json_reply({"counted": counts is not None, "layers": layers})
    reply.headers.update(_NOT_KEPT)
    return reply


async def stacks(_: web.Request) -> web.StreamResponse:
    """Every thread and every task, as text."""
    return web.Response(text=describe_stacks(), content_type="text/plain", charset="utf-8", headers=_NOT_KEPT)
