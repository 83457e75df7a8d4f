"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.protocol import unsupported
from oneloop.api.protocol.fields import Fields
from oneloop.api.protocol.messages import read_template_arguments
from oneloop.api.protocol.sampling import (
    Scheduling,
    StreamOptions,
    check_sampling,
    read_n,
    read_prompt_logprobs,
    read_sampling,
    read_scheduling,
    read_stream_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams, SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a checked request asks for its conversation: everything past this point is in range."""

    model: str | None
    form: ChatForm
    params: ResolvedParams
    max_tokens_field: str
    """The client's name for params.max_tokens."""
    stream: StreamOptions
    scheduling: Scheduling
    ignored: list[str]
    """Fields that had no effect."""


def read_chat(members: Mapping[str, Any], limits: Limits, defaults: SamplingDefaults) -> ChatRequest:
    """Check a body but for its messages. ApiError (400) naming the field."""
    fields = Fields(members)
    model = fields.text("model")
    form = read_chat_form(fields)
    stream = read_stream_options(fields)
    ignored = _read_tools(fields)
    max_tokens, max_tokens_field = _max_tokens(fields)
    names = {"max_tokens": max_tokens_field, "logprobs": "top_logprobs"}
    asked = read_sampling(
        fields,
        n=read_n(fields, 1, limits),
        max_tokens=max_tokens,
        logprobs=_logprobs(fields),
        prompt_logprobs=read_prompt_logprobs(fields, stream),
    )
    params = check_sampling(asked, defaults, limits, names)
    scheduling = read_scheduling(fields, limits)
    unsupported.refuse_unsupported(fields, unsupported.CHAT)
    return ChatRequest(
        model=model,
        form=form,
        params=params,
        max_tokens_field=max_tokens_field,
        stream=stream,
        scheduling=scheduling,
        ignored=ignored + fields.unread(),
    )


def read_chat_form(fields: Fields) -> ChatForm:
    """How the conversation is rendered (also the chat form of /tokenize)."""
    continue_final_message = fields.flag("continue_final_message", False)
    form = ChatForm(
        continue_final_message=continue_final_message,
        add_generation_prompt=fields.flag("add_generation_prompt", not continue_final_message),
        add_special_tokens=fields.flag("add_special_tokens", False),
        template_arguments=read_template_arguments(fields),
    )
    if form.continue_final_message and form.add_generation_prompt:
        raise fields.refuse("continue_final_message", "and add_generation_prompt exclude each other")
    return form


def _read_tools(fields: Fields) -> list[str]:
    """Tools are not supported yet; with tool_choice "none" they ask for nothing."""
    tools = fields.array("tools", at_most=1 << 10)
    if tools is None:
        return []
    if not tools:
        raise fields.refuse("tools", "must not be an empty list; leave it out")
    if fields.given("tool_choice") != "none":
        raise fields.refuse("tools", 'is not supported yet; leave it out, or send tool_choice "none"')
    return ["tools"]


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """max_completion_tokens wins over its old name."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _logprobs(fields: Fields) -> int | None:
    """None: not asked; else how many alternatives per token."""
    top = fields.integer("top_logprobs")
    if not fields.flag("logprobs", False):
        if top:
            raise fields.refuse("top_logprobs", "needs logprobs: true")
        return None
    return top or 0
