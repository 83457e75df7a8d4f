"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.handlers.prompt import render, tokenized
from oneloop.api.logprobs import token_text
from oneloop.api.protocol.tokenize import read_detokenize, read_tokenize
from oneloop.api.state import TEXT

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.state import TextState


async def tokenize(request: web.Request) -> web.StreamResponse:
    """Token ids of a text or of a rendered conversation."""
    state = request.app[TEXT]
    asked = read_tokenize(await state.bodies.read_object(request), state.limits)
    state.check_model(asked.model)
    headers = state.note_ignored(asked.ignored)
    given = asked.prompt
    if isinstance(given, str):
        text = given
    else:
        text = await render(state, given.messages, given.form, given.tools, given.documents)
    prompt = await tokenized(
        state,
        "prompt",
        text,
        add_special_tokens=asked.add_special_tokens,
        truncation=None if asked.truncation is None else asked.truncation.behind(state.limits, None),
        offsets=asked.return_token_offsets,
    )
    tokens = prompt.token_ids
    reply = {
        "count": len(tokens),
        "max_model_len": state.limits.max_model_len,
        "tokens": tokens,
        "token_strs": await _texts(state, tokens) if asked.return_token_strs else None,
    }
    if asked.return_token_offsets:
        reply["token_offsets"] = prompt.offsets
    return json_reply(reply, headers)


async def _texts(state: TextState, tokens: list[int]) -> list[str]:
    """Each token's text; in a thread, for there may be hundreds of thousands."""
    return await asyncio.to_thread(lambda: [token_text(state.engine.tokenizer, token) for token in tokens])


async def detokenize(request: web.Request) -> web.StreamResponse:
    """Text of token ids, special ones included."""
    state = request.app[TEXT]
    asked = read_detokenize(await state.bodies.read_object(request), state.limits)
    state.check_model(asked.model)
    headers = state.note_ignored(asked.ignored)
    text = await state.engine.decode(asked.token_ids, skip_special_tokens=False)
    return json_reply({"prompt": text}, headers)


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """What the tokenizer and the chat template are. Only with --enable-tokenizer-info-endpoint."""
    tokenizer = request.app[TEXT].engine.tokenizer
    template = tokenizer.chat_template
    return json_reply(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "special_token_ids": sorted(tokenizer.special_ids),
            **tokenizer.special_tokens,
            "model_max_length": request.app[TEXT].limits.max_model_len,
            "chat_template": None if template is None else template.source,
        }
    )
