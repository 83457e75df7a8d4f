"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from oneloop.api.chat_replies import ChatTeller
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.prompt import check_context, check_repeated, render, tokenized
from oneloop.api.parsing import parsing_of, strict_in_vain
from oneloop.api.prompt_logprobs import PromptScores
from oneloop.api.protocol.chat import read_chat
from oneloop.api.protocol.messages import read_messages
from oneloop.api.replies import ReplyHead, Told, Usage
from oneloop.engine.constraints import NO_CONSTRAINTS
from oneloop.engine.logprobs import make_encoders

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.handlers.prompt import Prompt
    from oneloop.api.parsing import Parsing
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
    headers = state.note_ignored(chat.ignored + ignored + _without_effect(state, chat))
    if chat.scheduling.request_id is not None:
        request_id = chat.scheduling.request_id
        rename(request_id)
    state.engine.check_accepting()
    params, told_back = chat.params, chat.told_back
    prompt = await conversation_prompt(state, messages, chat)
    parsing = _parsing(state, chat, prompt, messages)
    constraints = NO_CONSTRAINTS
    if parsing is not None:
        params, constraints = parsing.shown(params), parsing.constraints
        prompt = replace(prompt, token_ids=parsing.prompt(prompt.token_ids))
    check_context(
        params,
        len(prompt.token_ids),
        state.limits,
        prompt_field="messages",
        max_tokens_field=chat.max_tokens_field,
    )
    echo = _text(messages[-1]) if chat.echo and messages[-1]["role"] == "assistant" else ""
    check_repeated(len(echo) * params.n, params.n)
    usage = Usage(prompt_tokens=len(prompt.token_ids))
    vocabulary = await state.engine.id_vocabulary() if told_back.tokens_as_ids else None
    logprobs = make_encoders(state.engine.tokenizer, "chat", params, params.n, vocabulary=vocabulary)
    told = Told(told_back.token_ids, [prompt.told(told_back)])
    teller = ChatTeller(
        head=ReplyHead.make("chatcmpl", request_id, model),
        parsing=parsing,
        usage=usage,
        echo=echo,
        told=told,
    )
    return Job(
        prompts=[(prompt.token_ids, params)],
        scheduling=chat.scheduling,
        stream=chat.stream,
        usage=usage,
        headers=headers,
        num_choices=params.n,
        logprobs=logprobs,
        make_encoder=partial(teller.encoder, params.n, chat.stream, logprobs),
        make_reply=teller.reply,
        told=told,
        prompt_scores=None
        if params.prompt_logprobs is None
        else PromptScores(echoed=(), num_top=params.prompt_logprobs),
        constraints=constraints,
    )


def _without_effect(state: TextState, chat: ChatRequest) -> list[str]:
    """What this model's formats leave nothing to do for."""
    is_vain = chat.thinking_budget is not None and not state.formats.thinking_end
    vain = ["thinking_token_budget"] if is_vain else []
    return vain + strict_in_vain(state.formats, chat.tools, chat.params.grammar)


async def conversation_prompt(state: TextState, messages: list[dict[str, Any]], chat: ChatRequest) -> Prompt:
    """The conversation as the model reads it. messages: as read_messages() makes them."""
    form = chat.form
    text = await render(state, messages, form, chat.tools.offered, chat.documents)
    asked = chat.truncation
    return await tokenized(
        state,
        "messages",
        text,
        add_special_tokens=form.add_special_tokens,
        truncation=None if asked is None else asked.behind(state.limits, chat.params),
        offsets=chat.told_back.offsets,
    )


def _parsing(
    state: TextState, chat: ChatRequest, prompt: Prompt, messages: list[dict[str, Any]]
) -> Parsing | None:
    return parsing_of(
        state.formats,
        chat.tools,
        prompt=prompt.text or "",
        continued=_text(messages[-1]) if chat.form.continue_final_message else None,
        template_arguments=chat.form.template_arguments,
        include_reasoning=chat.include_reasoning,
        skip_special_tokens=chat.params.skip_special_tokens,
        grammar=chat.params.grammar,
        budget=chat.thinking_budget,
    )


def _text(message: dict[str, Any]) -> str:
    """A message's text, parts on lines of their own."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
