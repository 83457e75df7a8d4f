"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oneloop.api.handlers.json_reply import ignored_header, json_reply
from oneloop.api.handlers.prompt import check_text_len, render
from oneloop.api.logprobs import token_text
from oneloop.api.protocol.tokenize import read_detokenize, read_tokenize
from oneloop.api.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.state import ApiState


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of a text or of a rendered conversation."""
    state = request.app[STATE]
    asked = read_tokenize(await state.bodies.read_object(request))
    state.check_model(asked.model)
    prompt = asked.prompt
    text = prompt if isinstance(prompt, str) else await render(state, prompt.messages, prompt.form)
    check_text_len("prompt", text, state.limits)
    tokens = await state.engine.encode(text, add_special_tokens=asked.add_special_tokens)
    reply = {
        "count": len(tokens),
        "max_model_len": state.limits.max_model_len,
        "tokens": tokens,
        "token_strs": await _texts(state, tokens) if asked.return_token_strs else None,
    }
    return json_reply(reply, ignored_header(asked.ignored))


async def _texts(state: ApiState, tokens: list[int]) -> list[str]:
    """Each token's text; in a thread, for there may be hundreds of thousands."""
    return await asyncio.to_thread(lambda: [token_text(state.engine.tokenizer, token) for token in tokens])


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Text of token ids, special ones included."""
    state = request.app[STATE]
    asked = read_detokenize(await state.bodies.read_object(request), state.limits)
    state.check_model(asked.model)
    text = await state.engine.decode(asked.token_ids, skip_special_tokens=False)
    return json_reply({"prompt": text}, ignored_header(asked.ignored))
