"""The way of a generating request through aiohttp: read, prepared by its route, queued, answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.api.handlers.generation import abort_all, collect, submit_all
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.handlers.streaming import stream_reply
from oneloop.api.prompt_logprobs import encode_prompts
from oneloop.api.replies import encode_logprobs
from oneloop.api.state import REQUEST_ID, STATE

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.handlers.generation import Prepare
    from oneloop.engine.stream import RequestStream


async def answer(request: web.Request, prepare: Prepare) -> web.StreamResponse:
    """The reply, whole or streamed. prepare: the route's."""
    state = request.app[STATE]
    members = await state.bodies.read_object(request)

    def rename(request_id: str) -> None:
        request[REQUEST_ID] = request_id

    streams: list[RequestStream] = []
    try:
        with state.arrivals.one():
            job = await prepare(state, members, request[REQUEST_ID], rename)
            del members  # an answer may take long, and a conversation may be megabytes
            streams = job.streams
            await submit_all(state, streams, job, request[REQUEST_ID])
        if job.stream.stream:
            return await stream_reply(request, streams, job)
        assert job.make_reply is not None
        choices = await collect(state, streams, job)
        if job.prompt_scores is not None and streams:
            tokenizer = state.engine.tokenizer
            await encode_prompts(job.prompt_scores, streams, choices, job.logprobs, tokenizer)
        return json_reply(job.make_reply(choices, await encode_logprobs(choices, job.logprobs)), job.headers)
    finally:
        abort_all(streams)
