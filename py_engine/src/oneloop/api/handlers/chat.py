"""POST /v1/chat/completions."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.api.chunks import chat_chunks
from oneloop.api.handlers.generation import abort_all, collect, submit_all
from oneloop.api.handlers.json_reply import ignored_header, json_reply
from oneloop.api.handlers.prompt import check_context, check_text_len, render
from oneloop.api.handlers.streaming import stream_reply
from oneloop.api.logprobs import ChatLogprobs
from oneloop.api.protocol.chat import read_chat
from oneloop.api.replies import ReplyHead, Usage, chat_reply, encode_logprobs
from oneloop.api.state import REQUEST_ID, STATE

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.protocol.chat import ChatRequest
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """One conversation, n answers."""
    state = request.app[STATE]
    body = await state.bodies.read_object(request)
    began = perf_counter()
    chat = read_chat(body, state.limits, state.engine.default_sampling)
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(chat.model)
    if chat.scheduling.request_id is not None:
        request[REQUEST_ID] = chat.scheduling.request_id
    state.engine.check_accepting()
    text = await render(state, chat.prompt)
    chat.prompt.messages.clear()  # an answer may take long, and templates leave out what may be megabytes
    check_text_len("messages", text, state.limits)
    token_ids = await state.engine.encode(text, add_special_tokens=chat.prompt.add_special_tokens)
    params = chat.params
    check_context(
        params,
        len(token_ids),
        state.limits,
        prompt_field="messages",
        max_tokens_field=chat.max_tokens_field if chat.explicit_max_tokens else None,
    )
    head = ReplyHead.make("chatcmpl", request[REQUEST_ID], model)
    usage = Usage(prompt_tokens=len(token_ids))
    logprobs = _logprobs(state, chat)
    headers = ignored_header(chat.ignored)
    streams: list[RequestStream] = []
    try:
        await submit_all(state, streams, [(token_ids, params)], chat.scheduling)
        if not chat.stream.stream:
            choices = await collect(state, streams, params.n, usage)
            encoded = await encode_logprobs(choices, logprobs)
            return json_reply(chat_reply(head, choices, usage, encoded), headers)
        encoder = chat_chunks(head, num_choices=params.n, options=chat.stream, usage=usage, logprobs=logprobs)
        return await stream_reply(request, streams, encoder, usage, chat.stream, headers)
    finally:
        abort_all(streams)


def _logprobs(state: ApiState, chat: ChatRequest) -> list[ChatLogprobs] | None:
    params = chat.params
    if params.logprobs is None:
        return None
    return [
        ChatLogprobs(state.token_texts, num_top=params.logprobs, skip_special=params.skip_special_tokens)
        for _ in range(params.n)
    ]
