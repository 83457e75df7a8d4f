"""POST /v1/responses: the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.limits import MAX_METADATA_ENTRIES, MAX_METADATA_KEY_LEN, MAX_METADATA_VALUE_LEN, MAX_TOOLS
from oneloop.api.protocol import unsupported
from oneloop.api.protocol.chat import ChatForm, effort_arguments, read_effort, read_thinking_budget
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.messages import read_template_arguments
from oneloop.api.protocol.sampling import StreamOptions, check_sampling, read_sampling, read_scheduling
from oneloop.api.protocol.structured import read_flat_format, read_structured
from oneloop.api.protocol.tools import check_one_form, read_function, tool_use

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.api.protocol.sampling import Scheduling
    from oneloop.api.protocol.tools import ToolChoice, ToolUse
    from oneloop.engine.params import ResolvedParams, SamplingDefaults
    from oneloop.engine.structured import GrammarSpec

_FORMATS = ("text", "json_object", "json_schema")
LOGPROBS = "message.output_text.logprobs"
_WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **{name: harmless for name, harmless in unsupported.CHAT.items() if name != "tool_choice"},
    "conversation": (),
    "chat_template": (),
    "logprob_token_ids": ([],),
    "prompt": (),
    "n": (1,),
}
_MAX_INCLUDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """A checked request but for its input: everything past this point is in range."""

    model: str | None
    instructions: str | None
    previous_response_id: str | None
    tools: ToolUse
    form: ChatForm
    params: ResolvedParams
    stream: StreamOptions
    scheduling: Scheduling
    store: bool
    background: bool
    thinking_budget: int | None
    """Tokens that the thinking may have."""
    truncates: bool
    """Whether the oldest messages give way where the context is too small."""
    echoed: dict[str, Any]
    """Members of the request that the reply repeats."""
    ignored: list[str]
    """Fields that were read and had no effect."""


def read_response_request(fields: Fields, limits: Limits, defaults: SamplingDefaults) -> ResponsesRequest:
    """Check a body but for its input. ApiError (400) naming the field."""
    ignored: list[str] = []
    model = fields.text("model")
    instructions = fields.text("instructions")
    previous = fields.text("previous_response_id")
    tools, echoed_tools = _read_tools(fields)
    effort, arguments = _read_reasoning(fields)
    max_tokens = fields.integer("max_output_tokens")
    logprobs = _read_logprobs(fields, ignored)
    text, grammar = _read_text(fields, ignored)
    check_one_form(tools, grammar)
    asked = read_sampling(fields, n=1, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)
    names = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    params = check_sampling(asked, defaults, limits, names)
    stream, store, background = _read_ways(fields)
    truncation = fields.choice("truncation", ("auto", "disabled")) or "disabled"
    echoed = {
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls"),
        "metadata": _read_metadata(fields),
        "parallel_tool_calls": tools.parallel,
        "previous_response_id": previous,
        "reasoning": {"effort": effort, "summary": None},
        "text": text,
        "tool_choice": fields.given("tool_choice") or "auto",
        "tools": echoed_tools,
        "top_logprobs": params.logprobs or 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "truncation": truncation,
        "background": background,
        "store": store,
        "service_tier": "default",
    }
    ignored += [name for name in _WITHOUT_EFFECT if fields.given(name) is not None]
    budget = read_thinking_budget(fields)
    stream_options = fields.inner(fields.object("stream_options") or {}, "stream_options")
    # Usage is in every reply, and nothing is ever obfuscated.
    stream_options.flag("include_usage", False)
    stream_options.flag("include_obfuscation", False)
    fields.given("input")
    scheduling = read_scheduling(fields, limits)
    form = ChatForm(
        add_generation_prompt=True,
        continue_final_message=False,
        add_special_tokens=False,
        template_arguments={**arguments, **read_template_arguments(fields)},
    )
    unsupported.refuse_unsupported(fields, _UNSUPPORTED)
    return ResponsesRequest(
        model=model,
        instructions=instructions,
        previous_response_id=previous,
        tools=tools,
        form=form,
        params=params,
        stream=StreamOptions(stream=stream, include_usage=False, continuous_usage=False),
        scheduling=scheduling,
        store=store,
        background=background,
        thinking_budget=budget,
        truncates=truncation == "auto",
        echoed=echoed,
        ignored=ignored,
    )


def _read_ways(fields: Fields) -> tuple[bool, bool, bool]:
    """`stream`, `store`, `background`."""
    stream = fields.flag("stream", False)
    store, background = fields.flag("store", True), fields.flag("background", False)
    if background and not store:
        raise fields.refuse("background", "needs store: true, for the reply to be found again")
    if background and stream:
        raise fields.refuse("background", "and stream exclude each other; ask for the reply with GET")
    return stream, store, background


def _read_tools(fields: Fields) -> tuple[ToolUse, list[dict[str, Any]]]:
    """`tools`, `tool_choice`, `parallel_tool_calls`; and the tools as the reply repeats them."""
    tools, echoed, strict = [], [], set[str]()
    for index, raw in enumerate(fields.array("tools", at_most=MAX_TOOLS) or []):
        tool = fields.member(f"tools[{index}]", raw)
        kind = tool.text("type")
        if kind != "function":
            given = "is missing" if kind is None else f"{shown(kind)} is not supported"
            raise tool.refuse("type", f"{given}; this server calls no tools itself, only function is taken")
        made = read_function(tool, "parameters")
        tools.append(made)
        is_strict = tool.flag("strict", False)
        if is_strict:
            strict.add(made["function"]["name"])
        echoed.append({"type": "function", "strict": is_strict, "description": None, **made["function"]})
    choice, name = _read_tool_choice(fields)
    parallel = fields.flag("parallel_tool_calls", True)
    return tool_use(fields, tools, choice, name, parallel=parallel, strict=strict), echoed


def _read_tool_choice(fields: Fields) -> tuple[ToolChoice, str | None]:
    """Which tools are to be called, and the name of a single one."""
    match fields.given("tool_choice"):
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "name": str(name)} as choice:
            fields.inner({key: choice[key] for key in choice if key not in ("type", "name")}, "tool_choice")
            return "named", name
        case _:
            raise fields.refuse("tool_choice", 'must be "none", "auto", "required" or a function by name')


def _read_reasoning(fields: Fields) -> tuple[str | None, dict[str, Any]]:
    """`reasoning` → the effort, and what templates are told of it."""
    effort = read_effort(fields.inner(fields.object("reasoning") or {}, "reasoning"), "effort")
    return effort, effort_arguments(effort)


def _read_logprobs(fields: Fields, ignored: list[str]) -> int | None:
    """`include` and `top_logprobs`: None where no log-probabilities are shown, else alternatives per token."""
    include = fields.array("include", at_most=_MAX_INCLUDE) or []
    for name in include:
        if type(name) is not str:
            raise fields.refuse("include", f"must hold strings, got {shown(name)}")
    if any(name != LOGPROBS for name in include):
        ignored.append("include")
    top = fields.integer("top_logprobs")
    if LOGPROBS in include:
        return top or 0
    if top:
        ignored.append("top_logprobs")
    return None


def _read_metadata(fields: Fields) -> dict[str, str]:
    """`metadata`: repeated in the reply, so it is small."""
    metadata = fields.object("metadata") or {}
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise fields.refuse("metadata", f"may have at most {MAX_METADATA_ENTRIES} entries")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_LEN:
            raise fields.refuse("metadata", f"may have keys of at most {MAX_METADATA_KEY_LEN} characters")
        if type(value) is not str or len(value) > MAX_METADATA_VALUE_LEN:
            limit = f"strings of at most {MAX_METADATA_VALUE_LEN} characters"
            raise fields.refuse("metadata", f"must map to {limit}, got {shown(value)}")
    return metadata


def _read_text(fields: Fields, ignored: list[str]) -> tuple[dict[str, Any], GrammarSpec | None]:
    """`text`: what the answer has to look like, as the reply repeats it, and what it is held to."""
    text = fields.inner(fields.object("text") or {}, "text")
    wanted = text.shallow_object("format") or {"type": "text"}
    grammar, without_effect = read_structured(
        fields, name="text.format", read=lambda: read_flat_format(text, "format", _FORMATS)
    )
    ignored += without_effect
    return {"format": wanted}, grammar
