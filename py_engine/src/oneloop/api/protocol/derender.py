"""POST …/derender: what /inference/v1/generate answered → the reply of the API. The requests, and the carried state.

Everything here comes from a client, the state too: it is read as strictly as any other field, and what it says can
change nothing but this client's own reply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from oneloop.api.errors import bad_request
from oneloop.api.protocol.fields import Fields, shown, token_ids
from oneloop.api.protocol.messages import read_template_arguments
from oneloop.api.protocol.sampling import read_text_form
from oneloop.api.protocol.structured import read_structured
from oneloop.api.protocol.tools import ToolUse, read_tools
from oneloop.api.thinking_tokens import EndState
from oneloop.engine.params import MAX_LOGPROB_TOKEN_IDS
from oneloop.parsers.engine import PROMPT_END_CHARS
from oneloop.tokenize.output_text import MAX_TAIL, TextForm, TextState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.api.limits import Limits
    from oneloop.engine.outputs import FinishReason, TokenLogprobs
    from oneloop.engine.structured import GrammarSpec

Api = Literal["chat", "completion"]
STATE_VERSION = 1
MAX_TOP = MAX_LOGPROB_TOKEN_IDS
_FINISH_REASONS = ("stop", "length", "abort", "error")
_REPLY_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MARK_TAIL = re.compile(r"(?:[0-9a-f]{2}){0,64}")
_TOKEN_NAME = re.compile(r"token_id:([0-9]{1,8})")
_MAX_CREATED = 1 << 40
_MAX_COUNT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one choice of a generated reply, or of a chunk of it, holds."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A reply of /inference/v1/generate, or a chunk of one."""

    request_id: str
    created: int | None
    outputs: list[Output]
    prompt_tokens: int | None
    completion_tokens: int | None
    """Of its usage, where it has one."""
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParts:
    """What of a chat request says how its reply is taken apart."""

    tools: ToolUse = field(default_factory=ToolUse)
    include_reasoning: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continued: str | None = None
    """Text of the turn that is to go on."""
    prompt_end: Sequence[int] = ()
    """The last tokens of the prompt."""
    grammar: GrammarSpec | None = None
    """The form of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DerenderRequest:
    """As checked."""

    model: str | None
    stream: bool
    generated: list[Generated]
    """One per prompt; one chunk of a stream."""
    prompt_tokens: list[int | None]
    """One per prompt."""
    form: TextForm
    parts: ChatParts
    state: dict[int, ChoiceState] | None
    """Of a stream; None at its beginning."""
    ignored: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """Where one choice of a stream stands."""

    text: TextState
    ended: bool = False
    said: str = ""
    """All of the text so far, where it is taken apart: the parser reads it again."""
    end: EndState | None = None
    """What is known of the token that ends the thinking, where a form holds behind it."""

    def wire(self, index: int) -> dict[str, Any]:
        """As JSON carries it."""
        text = self.text
        return {
            "index": index,
            "num_tokens": text.num_tokens,
            "tail": text.tail,
            "num_shown": text.num_shown,
            "num_chars": text.num_chars,
            "ended": self.ended,
            "said": self.said,
            **({} if self.end is None else {"thinking_end": _end_wire(self.end)}),
        }


def read_derender(members: Mapping[str, Any], api: Api, limits: Limits) -> DerenderRequest:
    """Check a body. ApiError (400) naming the field."""
    fields = Fields(members)
    model = fields.text("model")
    stream = fields.flag("stream", False)
    original = "chat_request" if api == "chat" else "completion_request"
    request = fields.object(original)
    form, parts = TextForm(), ChatParts()
    if request is not None:
        asked = Fields(request, f"{original}.")
        form = read_text_form(asked)
        parts = read_chat_parts(asked) if api == "chat" else parts
    if stream:
        given = fields.object("generate_chunk")
        if given is None:
            raise fields.refuse("generate_chunk", "is missing; with stream: true send one chunk at a time")
        generated = [_generated(fields, "generate_chunk", given, limits, is_chunk=True)]
        state = _state(fields, limits)
    else:
        generated = _whole(fields, api, limits)
        state = None
    prompt = fields.array("prompt_token_ids", at_most=limits.max_detokenize_ids) or []
    return DerenderRequest(
        model=model,
        stream=stream,
        generated=generated,
        prompt_tokens=_prompt_tokens(fields, len(generated), limits),
        form=form,
        parts=replace(parts, prompt_end=prompt[-PROMPT_END_CHARS:]),
        state=state,
        ignored=fields.unread(),
    )


def read_chat_parts(fields: Fields) -> ChatParts:
    """Of the original request; what else it has was checked when it was rendered."""
    messages = fields.given("messages")
    continued = None
    if fields.flag("continue_final_message", False) and type(messages) is list and messages:
        final = messages[-1]
        content = final.get("content") if type(final) is dict else None
        continued = content if type(content) is str else ""
    return ChatParts(
        tools=read_tools(fields),
        include_reasoning=fields.flag("include_reasoning", True),
        template_arguments=read_template_arguments(fields),
        continued=continued,
        grammar=read_structured(fields)[0],
    )


def _whole(fields: Fields, api: Api, limits: Limits) -> list[Generated]:
    if api == "chat":
        given = fields.object("generate_response")
        if given is None:
            raise fields.refuse("generate_response", "is missing; send what /inference/v1/generate answered")
        return [_generated(fields, "generate_response", given, limits, is_chunk=False)]
    several = fields.array("generate_responses", at_most=limits.max_sequences)
    if not several:
        raise fields.refuse(
            "generate_responses", "must be a list of what /inference/v1/generate answered, one per prompt"
        )
    found = []
    for index, one in enumerate(several):
        name = f"generate_responses[{index}]"
        if type(one) is not dict:
            raise bad_request(name, f"{name} must be an object, got {shown(one)}")
        found.append(_generated(fields, name, one, limits, is_chunk=False))
    if sum(len(one.outputs) for one in found) > limits.max_sequences:
        raise fields.refuse("generate_responses", f"may hold at most {limits.max_sequences} choices in all")
    return found


def _generated(
    outer: Fields, key: str, given: Mapping[str, Any], limits: Limits, *, is_chunk: bool
) -> Generated:
    fields = outer.inner(given, key)
    request_id = fields.text("request_id")
    if request_id is None or not _REPLY_ID.fullmatch(request_id):
        raise fields.refuse("request_id", "must be 1 to 128 letters, digits, dots, dashes or underscores")
    choices = fields.array("choices", at_most=limits.max_sequences)
    if choices is None or not (choices or is_chunk):
        raise fields.refuse("choices", "must be a list with at least one choice")
    outputs = [_output(fields, f"choices[{place}]", choice, limits) for place, choice in enumerate(choices)]
    if len({output.index for output in outputs}) < len(outputs):
        raise fields.refuse("choices", "must have different indexes")
    if not is_chunk and any(output.index >= len(outputs) for output in outputs):
        raise fields.refuse("choices", f"must have the indexes 0 … {len(outputs) - 1}")
    usage = fields.inner(fields.object("usage") or {}, "usage")
    details = usage.inner(usage.object("prompt_tokens_details") or {}, "prompt_tokens_details")
    usage.given("total_tokens")
    for name in ("model", "prompt_logprobs", "kv_transfer_params", "ec_transfer_params"):
        fields.given(name)
    return Generated(
        request_id=request_id,
        created=_count(fields, "created", _MAX_CREATED),
        outputs=sorted(outputs, key=lambda output: output.index),
        prompt_tokens=_count(usage, "prompt_tokens", _MAX_COUNT),
        completion_tokens=_count(usage, "completion_tokens", _MAX_COUNT),
        cached_tokens=_count(details, "cached_tokens", _MAX_COUNT) or 0,
    )


def _output(outer: Fields, place: str, raw: Any, limits: Limits) -> Output:
    fields = outer.member(place, raw)
    given = fields.given("token_ids")
    if given is not None and type(given) is not list:
        raise fields.refuse("token_ids", f"must be a list of token ids, got {shown(given)}")
    ids: list[int] = []
    if given:
        ids = token_ids(fields.name("token_ids"), given, limits.vocab_size, at_most=limits.max_detokenize_ids)
    stop_reason = fields.given("stop_reason")
    if type(stop_reason) not in (int, str, type(None)):
        raise fields.refuse("stop_reason", f"must be a string or a token id, got {shown(stop_reason)}")
    fields.given("text")
    fields.given("routed_experts")
    return Output(
        index=_count(fields, "index", limits.max_sequences - 1) or 0,
        token_ids=ids,
        logprobs=_logprobs(fields, limits),
        finish_reason=cast("FinishReason | None", fields.choice("finish_reason", _FINISH_REASONS)),
        stop_reason=stop_reason,
    )


def _logprobs(outer: Fields, limits: Limits) -> list[TokenLogprobs] | None:
    given = outer.object("logprobs")
    if given is None:
        return None
    fields = outer.inner(given, "logprobs")
    content = fields.array("content", at_most=limits.max_detokenize_ids) or []
    fields.given("refusal")
    return [
        _token_logprobs(fields, f"content[{place}]", entry, limits) for place, entry in enumerate(content)
    ]


def _token_logprobs(outer: Fields, place: str, raw: Any, limits: Limits) -> TokenLogprobs:
    fields = outer.member(place, raw)
    entries = [_entry(fields, limits)]
    for index, top in enumerate(fields.array("top_logprobs", at_most=MAX_TOP) or []):
        entries.append(_entry(fields.member(f"top_logprobs[{index}]", top), limits))
    return 0, entries


def _entry(fields: Fields, limits: Limits) -> tuple[int, float]:
    found = _TOKEN_NAME.fullmatch(fields.text("token") or "")
    if found is None or int(found[1]) >= limits.vocab_size:
        raise fields.refuse("token", 'must name a token of the vocabulary: "token_id:5"')
    value = fields.number("logprob")
    if value is None:
        raise fields.refuse("logprob", "is missing")
    fields.given("bytes")
    return int(found[1]), value


def _prompt_tokens(fields: Fields, num_prompts: int, limits: Limits) -> list[int | None]:
    """`prompt_tokens`, a number or one per prompt; or `prompt_token_ids`, which are counted."""
    ids = fields.array("prompt_token_ids", at_most=limits.max_detokenize_ids)
    if ids is not None:
        if num_prompts != 1:
            raise fields.refuse("prompt_token_ids", "is for one prompt; send prompt_tokens, one number each")
        if ids:
            token_ids("prompt_token_ids", ids, limits.vocab_size, at_most=limits.max_detokenize_ids)
        fields.given("prompt_tokens")
        return [len(ids)]
    given = fields.given("prompt_tokens")
    if given is None:
        return [None] * num_prompts
    counts = given if type(given) is list else [given]
    if len(counts) != num_prompts:
        raise fields.refuse("prompt_tokens", f"must have one number per prompt ({num_prompts})")
    for count in counts:
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            raise fields.refuse("prompt_tokens", f"must be a number of tokens, got {shown(count)}")
    return counts


def _state(fields: Fields, limits: Limits) -> dict[int, ChoiceState] | None:
    given = fields.object("stream_state")
    if given is None:
        return None
    state = fields.inner(given, "stream_state")
    if state.integer("version") != STATE_VERSION:
        raise state.refuse("version", f"must be {STATE_VERSION}; send the state as the last reply had it")
    choices = state.array("choices", at_most=limits.max_sequences) or []
    found: dict[int, ChoiceState] = {}
    for place, choice in enumerate(choices):
        inner = state.member(f"choices[{place}]", choice)
        index = _count(inner, "index", limits.max_sequences - 1) or 0
        if index in found:
            raise state.refuse("choices", "must have different indexes")
        found[index] = _choice_state(inner, limits)
    return found


def _choice_state(fields: Fields, limits: Limits) -> ChoiceState:
    tail = fields.array("tail", at_most=MAX_TAIL) or []
    if tail:
        token_ids(fields.name("tail"), tail, limits.vocab_size, at_most=MAX_TAIL)
    return ChoiceState(
        text=TextState(
            num_tokens=_count(fields, "num_tokens", _MAX_COUNT) or 0,
            tail=tail,
            num_shown=_count(fields, "num_shown", _MAX_COUNT) or 0,
            num_chars=_count(fields, "num_chars", _MAX_COUNT) or 0,
        ),
        ended=fields.flag("ended", False),
        said=_said(fields, limits),
        end=_end(fields),
    )


def _end_wire(end: EndState) -> dict[str, Any]:
    return {"has_come": end.has_come, "num_marks": end.num_marks, "tail": end.tail.hex()}


def _end(outer: Fields) -> EndState | None:
    given = outer.object("thinking_end")
    if given is None:
        return None
    fields = outer.inner(given, "thinking_end")
    tail = fields.text("tail") or ""
    if not _MARK_TAIL.fullmatch(tail):
        raise fields.refuse("tail", "must be bytes in hexadecimal; send the state as the last reply had it")
    return EndState(
        has_come=fields.flag("has_come", False),
        num_marks=_count(fields, "num_marks", _MAX_COUNT) or 0,
        tail=bytes.fromhex(tail),
    )


def _said(fields: Fields, limits: Limits) -> str:
    said = fields.text("said") or ""
    if len(said) > limits.max_prompt_chars:
        raise fields.refuse("said", f"may have at most {limits.max_prompt_chars} characters")
    return said


def _count(fields: Fields, key: str, at_most: int) -> int | None:
    value = fields.integer(key)
    if value is not None and not 0 <= value <= at_most:
        raise fields.refuse(key, f"must be in 0 … {at_most}, got {shown(value)}")
    return value
