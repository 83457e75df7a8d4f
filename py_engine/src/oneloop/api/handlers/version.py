"""/version."""

from __future__ import annotations

from aiohttp import web

import oneloop
from oneloop.api.handlers.json_reply import json_reply


async def version(request: web.Request) -> web.StreamResponse:
    """The version of this server."""
    return json_reply({"version": oneloop.__version__})
