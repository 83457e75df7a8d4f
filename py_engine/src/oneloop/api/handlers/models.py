"""/v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.state import STATE, ApiState

if TYPE_CHECKING:
    from aiohttp import web


async def list_models(request: web.Request) -> web.StreamResponse:
    """Every name the model is served under."""
    state = request.app[STATE]
    names = state.engine.served_model_names
    return json_reply({"object": "list", "data": [_card(state, name) for name in names]})


async def show_model(request: web.Request) -> web.StreamResponse:
    """One of them; 404 for another name."""
    state = request.app[STATE]
    return json_reply(_card(state, state.check_model(request.match_info["model"])))


def _card(state: ApiState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "oneloop",
        "root": name,
        "parent": None,
        "max_model_len": state.limits.max_model_len,
        "vocab_size": state.limits.vocab_size,
        "permission": [],
    }
