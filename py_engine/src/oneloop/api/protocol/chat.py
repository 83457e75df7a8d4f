"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.limits import MAX_TEMPLATE_CHARS
from oneloop.api.protocol import unsupported
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.messages import read_template_arguments
from oneloop.api.protocol.prompt_fields import (
    AskedTruncation,
    ToldBack,
    read_documents,
    read_told_back,
    read_truncation,
)
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
from oneloop.api.protocol.structured import read_structured
from oneloop.api.protocol.tools import ToolUse, check_one_form, read_tools
from oneloop.engine.constraints import UNLIMITED_THINKING
from oneloop.tokenize.conversation import ChatForm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams, SamplingDefaults


__all__ = ["ChatForm", "ChatRequest", "read_chat", "read_chat_form"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a checked request asks for its conversation: everything past this point is in range."""

    model: str | None
    form: ChatForm
    documents: list[dict[str, Any]]
    truncation: AskedTruncation | None
    told_back: ToldBack
    echo: bool
    """The final message's text goes before the answer."""
    params: ResolvedParams
    max_tokens_field: str
    """The client's name for params.max_tokens."""
    stream: StreamOptions
    scheduling: Scheduling
    tools: ToolUse
    include_reasoning: bool
    """Whether the thinking is shown."""
    thinking_budget: int | None
    """Tokens that the thinking may have."""
    ignored: list[str]
    """Fields that had no effect."""


def read_chat(members: Mapping[str, Any], limits: Limits, defaults: SamplingDefaults) -> ChatRequest:
    """Check a body but for its messages. ApiError (400) naming the field."""
    fields = Fields(members)
    model = fields.text("model")
    form = read_chat_form(fields, limits)
    stream = read_stream_options(fields, limits)
    tools = read_tools(fields)
    include_reasoning = fields.flag("include_reasoning", True)
    documents = read_documents(fields)
    truncation = read_truncation(fields, limits)
    told_back = read_told_back(fields)
    echo = fields.flag("echo", False)
    max_tokens, max_tokens_field = _max_tokens(fields)
    names = {"max_tokens": max_tokens_field, "logprobs": "top_logprobs"}
    grammar, without_effect = read_structured(fields)
    check_one_form(tools, grammar)
    budget = read_thinking_budget(fields)
    asked = read_sampling(
        fields,
        n=read_n(fields, 1, limits),
        max_tokens=max_tokens,
        logprobs=_logprobs(fields),
        grammar=grammar,
        prompt_logprobs=read_prompt_logprobs(fields, stream),
    )
    params = check_sampling(asked, defaults, limits, names)
    scheduling = read_scheduling(fields, limits)
    unsupported.refuse_unsupported(fields, unsupported.CHAT)
    return ChatRequest(
        model=model,
        form=form,
        tools=tools,
        documents=documents,
        truncation=truncation,
        told_back=told_back,
        echo=echo,
        params=params,
        max_tokens_field=max_tokens_field,
        stream=stream,
        scheduling=scheduling,
        include_reasoning=include_reasoning,
        thinking_budget=budget,
        ignored=without_effect + _outdone(fields, params) + fields.unread(),
    )


def read_chat_form(fields: Fields, limits: Limits) -> ChatForm:
    """How the conversation is rendered (also the chat form of /tokenize)."""
    continue_final_message = fields.flag("continue_final_message", False)
    form = ChatForm(
        continue_final_message=continue_final_message,
        add_generation_prompt=fields.flag("add_generation_prompt", not continue_final_message),
        add_special_tokens=fields.flag("add_special_tokens", False),
        template_arguments={
            **effort_arguments(read_effort(fields, "reasoning_effort")),
            **read_template_arguments(fields),
        },
        chat_template=_chat_template(fields, limits),
    )
    if form.continue_final_message and form.add_generation_prompt:
        raise fields.refuse("continue_final_message", "and add_generation_prompt exclude each other")
    return form


def read_effort(fields: Fields, key: str) -> str | None:
    """How much the model is to think."""
    return fields.choice(key, EFFORTS)


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """The same as templates read it; "none": no thinking at all."""
    if effort is None:
        return {}
    return {"enable_thinking": False, "thinking": False} if effort == "none" else {"reasoning_effort": effort}


def read_thinking_budget(fields: Fields) -> int | None:
    """`thinking_token_budget`: after so many tokens the thinking is ended. None: without a bound."""
    budget = fields.integer("thinking_token_budget")
    if budget is not None and budget < 0:
        raise fields.refuse("thinking_token_budget", f"must be at least 0, got {shown(budget)}")
    return None if budget is None else min(budget, UNLIMITED_THINKING)


def _chat_template(fields: Fields, limits: Limits) -> str | None:
    template = fields.text("chat_template")
    if template is None:
        return None
    if not limits.request_templates:
        raise fields.refuse(
            "chat_template", "needs a server that runs with --trust-request-chat-template; leave it out"
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise fields.refuse(
            "chat_template", f"may have at most {MAX_TEMPLATE_CHARS} characters, got {len(template)}"
        )
    return template


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """max_completion_tokens wins over its old name."""
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _outdone(fields: Fields, params: ResolvedParams) -> list[str]:
    """The likeliest tokens give way to those that the request names."""
    return ["top_logprobs"] if params.logprob_token_ids and fields.integer("top_logprobs") else []


def _logprobs(fields: Fields) -> int | None:
    """None: not asked; else how many alternatives per token."""
    top = fields.integer("top_logprobs")
    if not fields.flag("logprobs", False):
        if top:
            raise fields.refuse("top_logprobs", "needs logprobs: true")
        return None
    return top or 0
