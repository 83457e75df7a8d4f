"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.handlers.generation import abort_all, check_delta
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.handlers.prompt import check_context, tokenized
from oneloop.api.protocol.embeddings import read_embedding
from oneloop.api.state import REQUEST_ID, STATE
from oneloop.engine.embedding import vector_of
from oneloop.tokenize.renderer import kept

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.protocol.embeddings import EmbeddingRequest
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream


async def embeddings(request: web.Request) -> web.StreamResponse:
    """A vector for each prompt."""
    state = request.app[STATE]
    asked = read_embedding(await state.bodies.read_object(request), state.limits, state.engine.model_info)
    model = state.check_model(asked.model)
    headers = state.note_ignored(asked.ignored)
    if asked.scheduling.request_id is not None:
        request[REQUEST_ID] = asked.scheduling.request_id
    state.engine.check_accepting()
    prompts = [await _token_ids(state, asked, prompt) for prompt in asked.prompts]
    streams: list[RequestStream] = []
    try:
        for prompt in prompts:
            stream = await state.engine.submit(
                prompt,
                asked.params,
                request_id=request[REQUEST_ID],
                priority=asked.scheduling.priority,
                cache_salt=asked.scheduling.cache_salt,
            )
            streams.append(stream)  # at once: what is queued must be ended if the next is refused
        data = [await _entry(state, asked, index, stream) for index, stream in enumerate(streams)]
    finally:
        abort_all(streams)
    num_tokens = sum(len(prompt) for prompt in prompts)
    num_cached = sum(stream.num_cached_tokens for stream in streams)
    reply = {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }
    return json_reply(reply, headers)


async def _token_ids(state: ApiState, asked: EmbeddingRequest, prompt: str | list[int]) -> list[int]:
    """A prompt as ids that fit the context."""
    limits = state.limits
    truncation = None if asked.truncation is None else asked.truncation.behind(limits, None)
    if isinstance(prompt, str):
        special = asked.add_special_tokens
        found = await tokenized(state, "input", prompt, add_special_tokens=special, truncation=truncation)
        prompt = found.token_ids
    else:
        prompt = kept(prompt, prompt, truncation, state.engine.tokenizer.bos_token_id)
    check_context(asked.params, len(prompt), limits, prompt_field="input", max_tokens_field="input")
    return prompt


async def _entry(
    state: ApiState, asked: EmbeddingRequest, index: int, stream: RequestStream
) -> dict[str, Any]:
    """One element of `data`, once its request has ended. Others get a turn between two."""
    for delta in await stream.all_deltas():
        check_delta(state, stream, delta)
    assert stream.pooled is not None
    vector = vector_of(stream.pooled, normalize=asked.normalize, size=asked.dimensions)
    encoded: str | orjson.Fragment
    if asked.base64:
        encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        encoded = orjson.Fragment(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))
    await asyncio.sleep(0)
    return {"object": "embedding", "index": index, "embedding": encoded}
