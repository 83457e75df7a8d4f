"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from oneloop.api.anthropic.events import MessageEncoder
from oneloop.api.anthropic.reply import whole_message
from oneloop.api.anthropic.request import read_count_request, read_message_request
from oneloop.api.handlers.answer import answer
from oneloop.api.handlers.generation import Job
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.handlers.prompt import check_context, check_text_len, render
from oneloop.api.parsing import parsing_of
from oneloop.api.replies import ReplyHead, Usage
from oneloop.api.reply_format import block_source
from oneloop.api.state import STATE
from oneloop.engine.constraints import NO_CONSTRAINTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from oneloop.api.anthropic.request import AnthropicPrompt, AnthropicRequest
    from oneloop.api.parsing import Parsing
    from oneloop.api.state import ApiState


async def messages(request: web.Request) -> web.StreamResponse:
    """One conversation, one answer."""
    return await answer(request, prepare_message)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens a conversation's prompt has."""
    state = request.app[STATE]
    members = await state.bodies.read_object(request)
    prompt = read_count_request(members, keep_billing_line=state.config.keep_billing_header)
    state.check_model(prompt.model)
    return json_reply({"input_tokens": len((await _rendered(state, prompt))[1])})


async def prepare_message(
    state: ApiState, members: dict[str, object], request_id: str, rename: Callable[[str], None]
) -> Job:
    """As Prepare."""
    asked = read_message_request(
        members,
        state.limits,
        state.engine.default_sampling,
        keep_billing_line=state.config.keep_billing_header,
    )
    model = state.check_model(asked.prompt.model)
    if asked.scheduling.request_id is not None:
        request_id = asked.scheduling.request_id
        rename(request_id)
    state.engine.check_accepting()
    text, token_ids = await _rendered(state, asked.prompt)
    parsing = _parsing(state, asked, text)
    headers = state.note_ignored(_without_effect(state, asked, parsing) + asked.ignored)
    params, constraints = asked.params, NO_CONSTRAINTS
    if parsing is not None:
        params, constraints = parsing.shown(params), parsing.constraints
        token_ids = parsing.prompt(token_ids)
    check_context(
        params, len(token_ids), state.limits, prompt_field="messages", max_tokens_field="max_tokens"
    )
    assert params.max_tokens is not None
    is_full = len(token_ids) + params.max_tokens > state.limits.max_model_len
    head = ReplyHead(f"msg_{request_id}", int(time.time()), model)
    usage = Usage(prompt_tokens=len(token_ids))
    source = partial(block_source, parsing, usage)
    return Job(
        prompts=[(token_ids, params)],
        scheduling=asked.scheduling,
        stream=asked.stream,
        usage=usage,
        headers=headers,
        num_choices=1,
        logprobs=None,
        make_encoder=lambda: MessageEncoder(head, usage, source(), request_id=request_id, is_full=is_full),
        make_reply=lambda choices, _: whole_message(head, choices[0], usage, source(), is_full=is_full),
        constraints=constraints,
    )


def _without_effect(state: ApiState, asked: AnthropicRequest, parsing: Parsing | None) -> list[str]:
    """What this model's formats leave nothing to do for."""
    is_vain = asked.prompt.thinking_budget is not None and not state.formats.thinking_end
    vain = ["thinking.budget_tokens"] if is_vain else []
    return vain if parsing is None else vain + parsing.without_effect


def _parsing(state: ApiState, asked: AnthropicRequest, text: str) -> Parsing | None:
    """How the reply is taken apart. text: of the prompt."""
    prompt = asked.prompt
    return parsing_of(
        state.formats,
        prompt.tools,
        prompt=text,
        continued=prompt.messages[-1]["content"] if prompt.form.continue_final_message else None,
        template_arguments=prompt.form.template_arguments,
        skip_special_tokens=asked.params.skip_special_tokens,
        grammar=asked.params.grammar,
        budget=prompt.thinking_budget,
    )


async def _rendered(state: ApiState, prompt: AnthropicPrompt) -> tuple[str, list[int]]:
    """The prompt, as text and as tokens."""
    text = await render(state, prompt.messages, prompt.form, prompt.tools.offered)
    check_text_len("messages", text, state.limits)
    return text, await state.engine.encode(text, add_special_tokens=prompt.form.add_special_tokens)
