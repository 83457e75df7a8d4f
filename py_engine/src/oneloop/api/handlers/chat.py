"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.api.chunks import chat_chunks
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.json_reply import ignored_header
from oneloop.api.handlers.prompt import check_context, check_text_len, render
from oneloop.api.prompt_logprobs import PromptScores
from oneloop.api.protocol.chat import read_chat
from oneloop.api.protocol.messages import read_messages
from oneloop.api.replies import ReplyHead, Usage, chat_reply
from oneloop.engine.logprobs import make_encoders

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.state import ApiState


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """One conversation, n answers."""
    return await answer(request, prepare_chat)


async def prepare_chat(
    state: ApiState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    began = perf_counter()
    messages = read_messages(members.pop("messages", None))
    chat = state.repeated_chats.read(
        members, 1, lambda: read_chat(members, state.limits, state.engine.default_sampling)
    )
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(chat.model)
    if chat.scheduling.request_id is not None:
        request_id = chat.scheduling.request_id
        rename(request_id)
    state.engine.check_accepting()
    text = await render(state, messages, chat.form)
    check_text_len("messages", text, state.limits)
    token_ids = await state.engine.encode(text, add_special_tokens=chat.form.add_special_tokens)
    params = chat.params
    check_context(
        params,
        len(token_ids),
        state.limits,
        prompt_field="messages",
        max_tokens_field=chat.max_tokens_field,
    )
    head = ReplyHead.make("chatcmpl", request_id, model)
    usage = Usage(prompt_tokens=len(token_ids))
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, params.n)
    return Job(
        prompts=[(token_ids, params)],
        scheduling=chat.scheduling,
        stream=chat.stream,
        usage=usage,
        headers=ignored_header(chat.ignored),
        num_choices=params.n,
        logprobs=logprobs,
        make_encoder=partial(
            chat_chunks, head, num_choices=params.n, options=chat.stream, usage=usage, logprobs=logprobs
        ),
        make_reply=lambda choices, encoded: chat_reply(head, choices, usage, encoded),
        prompt_scores=None
        if params.prompt_logprobs is None
        else PromptScores(echoed=(), num_top=params.prompt_logprobs),
    )
