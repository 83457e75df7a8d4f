"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from oneloop.api.chunks import chat_chunks
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.prompt import check_context, render, tokenized
from oneloop.api.protocol.chat import read_chat
from oneloop.api.protocol.messages import read_messages
from oneloop.api.replies import ReplyHead, Told, Usage, chat_reply
from oneloop.engine.logprobs import make_encoders

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.handlers.prompt import Prompt
    from oneloop.api.protocol.chat import ChatRequest
    from oneloop.api.state import TextState


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """One conversation, n answers."""
    return await answer(request, prepare_chat)


async def prepare_chat(
    state: TextState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    began = perf_counter()
    ignored: list[str] = []
    messages = read_messages(members.pop("messages", None), ignored)
    chat = state.repeated_chats.read(
        members, 1, lambda: read_chat(members, state.limits, state.engine.default_sampling)
    )
    state.engine.metrics.loop.parts["parse"] += perf_counter() - began
    model = state.check_model(chat.model)
    headers = state.note_ignored(chat.ignored + ignored)
    if chat.scheduling.request_id is not None:
        request_id = chat.scheduling.request_id
        rename(request_id)
    state.engine.check_accepting()
    params, told_back = chat.params, chat.told_back
    prompt = await conversation_prompt(state, messages, chat)
    check_context(
        params,
        len(prompt.token_ids),
        state.limits,
        prompt_field="messages",
        max_tokens_field=chat.max_tokens_field,
    )
    head = ReplyHead.make("chatcmpl", request_id, model)
    usage = Usage(prompt_tokens=len(prompt.token_ids))
    vocabulary = await state.engine.id_vocabulary() if told_back.tokens_as_ids else None
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, params.n, vocabulary=vocabulary)
    told = Told(told_back.token_ids, [prompt.told(told_back)])
    echo = _echo(messages[-1]) if chat.echo else ""
    return Job(
        prompts=[(prompt.token_ids, params)],
        scheduling=chat.scheduling,
        stream=chat.stream,
        usage=usage,
        headers=headers,
        num_choices=params.n,
        logprobs=logprobs,
        make_encoder=partial(
            chat_chunks,
            head,
            num_choices=params.n,
            options=chat.stream,
            usage=usage,
            logprobs=logprobs,
            echo=echo,
            told=told,
        ),
        make_reply=lambda choices, encoded: chat_reply(head, choices, usage, encoded, echo=echo, told=told),
        told=told,
    )


async def conversation_prompt(state: TextState, messages: list[dict[str, Any]], chat: ChatRequest) -> Prompt:
    """The conversation as the model reads it. messages: as read_messages() makes them."""
    form = chat.form
    text = await render(state, messages, form, chat.tools, chat.documents)
    asked = chat.truncation
    return await tokenized(
        state,
        "messages",
        text,
        add_special_tokens=form.add_special_tokens,
        truncation=None if asked is None else asked.behind(state.limits, chat.params),
        offsets=chat.told_back.offsets,
    )


def _echo(final: dict[str, Any]) -> str:
    """The final message's text, where the answer goes on with it: it is the assistant's own."""
    content = final["content"]
    if final["role"] != "assistant":
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
