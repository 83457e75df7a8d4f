"""POST /v1/messages and /v1/messages/count_tokens: the requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oneloop.api.anthropic.history import read_history, read_system
from oneloop.api.limits import MAX_TOOLS
from oneloop.api.protocol import unsupported
from oneloop.api.protocol.chat import ChatForm
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.messages import read_template_arguments
from oneloop.api.protocol.sampling import StreamOptions, check_sampling, read_sampling, read_scheduling
from oneloop.api.protocol.structured import read_flat_format, read_structured
from oneloop.api.protocol.tools import ToolChoice, ToolUse, check_one_form, read_function, tool_use
from oneloop.engine.constraints import UNLIMITED_THINKING
from oneloop.engine.params import MAX_STOP_STRINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.api.protocol.sampling import Scheduling
    from oneloop.engine.params import ResolvedParams, SamplingDefaults
    from oneloop.engine.structured import GrammarSpec

_WITHOUT_EFFECT = ("metadata", "service_tier", "container", "context_management", "betas", "inference_geo")
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: harmless for name, harmless in unsupported.CHAT.items() if name != "tool_choice"},
    "mcp_servers": ([],),
    "chat_template": (),
    "n": (1,),
    "logprobs": (False,),
    "logprob_token_ids": ([],),
    "top_logprobs": (0,),
}
_FORMATS = ("json_schema",)
_TYPES_OF_TOOLS = (None, "custom")
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicPrompt:
    """What both routes read: everything the prompt is made of."""

    model: str | None
    messages: list[dict[str, Any]]
    tools: ToolUse
    form: ChatForm
    thinking_budget: int | None
    """Tokens that the thinking may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicRequest:
    """A checked request: everything past this point is in range."""

    prompt: AnthropicPrompt
    params: ResolvedParams
    stream: StreamOptions
    scheduling: Scheduling
    ignored: list[str]
    """Fields that had no effect."""


def read_message_request(
    members: Mapping[str, Any], limits: Limits, defaults: SamplingDefaults, *, keep_billing_line: bool
) -> AnthropicRequest:
    """Check a body. ApiError (400) naming the field. keep_billing_line: as read_system()."""
    fields = Fields(members)
    prompt = _read_prompt(fields, keep_billing_line)
    max_tokens = fields.integer("max_tokens")
    if max_tokens is None:
        raise fields.refuse("max_tokens", "is missing")
    grammar, ignored = _read_form(fields)
    check_one_form(prompt.tools, grammar)
    asked = replace(
        read_sampling(fields, n=1, max_tokens=max_tokens, logprobs=None, grammar=grammar),
        stop=_stop_sequences(fields),
    )
    params = check_sampling(asked, defaults, limits, {"stop": "stop_sequences"})
    scheduling = read_scheduling(fields, limits)
    stream = StreamOptions(stream=fields.flag("stream", False), include_usage=False, continuous_usage=False)
    ignored += [name for name in _WITHOUT_EFFECT if fields.given(name) is not None]
    unsupported.refuse_unsupported(fields, _UNSUPPORTED)
    return AnthropicRequest(
        prompt=prompt,
        # Clients must name a number, and name the largest they can think of: the context cuts it.
        params=replace(params, max_tokens_is_default=True),
        stream=stream,
        scheduling=scheduling,
        ignored=ignored + fields.unread(),
    )


def read_count_request(members: Mapping[str, Any], *, keep_billing_line: bool) -> AnthropicPrompt:
    """Check a body of /count_tokens; as read_message_request()."""
    return _read_prompt(Fields(members), keep_billing_line)


def _read_prompt(fields: Fields, keep_billing_line: bool) -> AnthropicPrompt:
    model = fields.text("model")
    system = read_system(fields, keep_billing_line=keep_billing_line)
    messages = read_history(fields, system)
    tools = _read_tools(fields)
    arguments, budget = _read_thinking(fields)
    goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    form = ChatForm(
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        add_special_tokens=False,
        template_arguments={**arguments, **read_template_arguments(fields)},
    )
    return AnthropicPrompt(model=model, messages=messages, tools=tools, form=form, thinking_budget=budget)


def _read_thinking(fields: Fields) -> tuple[dict[str, Any], int | None]:
    """`thinking` → what templates are told of it, and the tokens that it may have."""
    thinking = fields.inner(fields.object("thinking") or {}, "thinking")
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
    budget = thinking.integer("budget_tokens")
    if budget is not None and budget < 1:
        raise thinking.refuse("budget_tokens", f"must be at least 1, got {budget}")
    budget = None if budget is None else min(budget, UNLIMITED_THINKING)
    if kind is None or kind == "adaptive":
        return {}, budget
    return {"enable_thinking": kind == "enabled", "thinking": kind == "enabled"}, budget


def _read_tools(fields: Fields) -> ToolUse:
    """`tools` and `tool_choice`."""
    tools, strict = [], set[str]()
    for index, raw in enumerate(fields.array("tools", at_most=MAX_TOOLS) or []):
        tool = fields.member(f"tools[{index}]", raw)
        tool.given("cache_control")
        kind = tool.text("type")
        if kind not in _TYPES_OF_TOOLS:
            raise tool.refuse("type", f"{shown(kind)} is not supported; this server runs no tools of its own")
        tools.append(read_function(tool, "input_schema"))
        if tool.flag("strict", False):
            strict.add(tools[-1]["function"]["name"])
    given = fields.object("tool_choice")
    choice = fields.inner({"type": "auto"} if given is None else given, "tool_choice")
    kind = choice.choice("type", _CHOICES)
    if kind is None:
        raise choice.refuse("type", "is missing")
    name = choice.text("name") if kind == "tool" else None
    if kind == "tool" and not name:
        raise choice.refuse("name", "is missing")
    parallel = not choice.flag("disable_parallel_tool_use", False)
    return tool_use(fields, tools, _CHOICES[kind], name, parallel=parallel, strict=strict)


def _stop_sequences(fields: Fields) -> tuple[str, ...]:
    sequences = fields.array("stop_sequences", at_most=MAX_STOP_STRINGS) or []
    for text in sequences:
        if type(text) is not str or not text:
            raise fields.refuse("stop_sequences", f"must hold non-empty strings, got {shown(text)}")
    return tuple(sequences)


def _read_form(fields: Fields) -> tuple[GrammarSpec | None, list[str]]:
    """`output_config.format` (before: `output_format`) asks for JSON by a schema; other members have no effect."""
    config = fields.inner(fields.object("output_config") or {}, "output_config")
    has_new = config.has("format")
    if has_new and fields.has("output_format"):
        raise fields.refuse("output_format", "is the older name of output_config.format; send one of them")
    outer, key = (config, "format") if has_new else (fields, "output_format")
    return read_structured(fields, name=outer.name(key), read=lambda: read_flat_format(outer, key, _FORMATS))
