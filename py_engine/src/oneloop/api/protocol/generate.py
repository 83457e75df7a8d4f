"""POST /inference/v1/generate: tokens in, tokens out. The request, and the same as /render writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from oneloop.api.errors import ApiError, bad_request
from oneloop.api.protocol import unsupported
from oneloop.api.protocol.chat import read_thinking_budget
from oneloop.api.protocol.derender import ChatParts, read_chat_parts
from oneloop.api.protocol.fields import Fields, token_ids
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
from oneloop.api.protocol.structured import read_structured, structured_wire
from oneloop.parsers.engine import PROMPT_END_CHARS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams, SamplingDefaults

OutputMode = Literal["tokens", "text", "derender"]
OUTPUT_MODES = ("tokens", "text", "derender")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,96}")
"""As replies have them: "chatcmpl-" and what a client may choose."""
_PARAMS = "sampling_params"
PASSED_ON = (
    "allowed_token_ids", "bad_words", "logprob_token_ids", "thinking_token_budget", "deterministic",
)  # fmt: skip
"""What a request says of the generation in words that every route has: /render hands it on as it was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """As checked."""

    model: str | None
    request_id: str | None
    token_ids: list[int]
    params: ResolvedParams
    output_mode: OutputMode
    parts: ChatParts
    """Of the chat request behind it, for output_mode derender."""
    thinking_budget: int | None
    """Tokens that the thinking may have."""
    stream: StreamOptions
    scheduling: Scheduling
    ignored: list[str]


def read_generate(members: Mapping[str, Any], limits: Limits, defaults: SamplingDefaults) -> GenerateRequest:
    """Check a body. ApiError (400) naming the field."""
    fields = Fields(members)
    model = fields.text("model")
    request_id = fields.text("request_id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise fields.refuse("request_id", "must be 1 to 96 letters, digits, dots, dashes or underscores")
    prompt = fields.given("token_ids")
    if type(prompt) is not list:
        raise fields.refuse("token_ids", "is missing; send a list of token ids")
    ids = token_ids("token_ids", prompt, limits.vocab_size, at_most=limits.max_model_len)
    mode = fields.choice("output_mode", OUTPUT_MODES) or "tokens"
    original = fields.object("chat_request")
    parts = ChatParts() if original is None else read_chat_parts(Fields(original, "chat_request."))
    if fields.given("features") is not None:
        raise fields.refuse("features", "is not supported: this model reads text")
    stream = read_stream_options(fields, limits)
    params, budget, without_effect = _read_params(fields, stream, limits, defaults)
    if params.grammar is not None:
        parts = replace(parts, grammar=params.grammar)
    # the rest of what /render writes, for whoever sends its reply back as it is
    for name in ("prompt_text", "token_offsets", "prompt_token_ids"):
        fields.given(name)
    scheduling = read_scheduling(Fields({**members, "request_id": None}), limits)
    for name in ("priority", "cache_salt"):
        fields.given(name)
    unsupported.refuse_unsupported(fields, unsupported.COMPLETION)
    return GenerateRequest(
        model=model,
        request_id=request_id,
        token_ids=ids,
        params=params,
        thinking_budget=budget,
        output_mode=cast("OutputMode", mode),
        parts=replace(parts, prompt_end=ids[-PROMPT_END_CHARS:]),
        stream=stream,
        scheduling=scheduling,
        ignored=without_effect + fields.unread(),
    )


def _read_params(
    fields: Fields, stream: StreamOptions, limits: Limits, defaults: SamplingDefaults
) -> tuple[ResolvedParams, int | None, list[str]]:
    """`sampling_params`, as the other routes have them at the top; what is left open is as in chat.

    And how many tokens the thinking may have, and fields that have no effect.
    """
    inner = fields.inner(fields.object(_PARAMS) or {}, _PARAMS)
    try:
        grammar, without_effect = read_structured(inner)
    except ApiError as error:
        raise bad_request(f"{_PARAMS}.{error.param}", f"{_PARAMS}.{error.message}") from None
    asked = read_sampling(
        inner,
        n=read_n(inner, 1, limits),
        max_tokens=inner.integer("max_tokens"),
        logprobs=inner.integer("logprobs"),
        prompt_logprobs=read_prompt_logprobs(inner, stream),
        grammar=grammar,
    )
    budget = read_thinking_budget(inner)
    inner.flag("detokenize", True)  # output_mode says it
    unsupported.refuse_unsupported(inner, unsupported.COMPLETION)
    if grammar is not None:
        grammar = replace(grammar, field=f"{_PARAMS}.{grammar.field}")
    params = check_sampling(replace(asked, structured_outputs=grammar), defaults, limits, _NAMES)
    return params, budget, [f"{_PARAMS}.{name}" for name in without_effect]


_NAMES = {
    name: f"{_PARAMS}.{name}"
    for name in (
        "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias",
        "logprob_token_ids", "deterministic",
        "allowed_token_ids", "bad_words", "length_penalty", "early_stopping",
    )
}  # fmt: skip


def sampling_wire(params: ResolvedParams) -> dict[str, Any]:
    """`sampling_params` that mean these, whatever the defaults where they are read. Fits behind the prompt already."""
    found: dict[str, Any] = {
        "n": params.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias},
        **_beams_wire(params),
        "structured_outputs": None if params.grammar is None else structured_wire(params.grammar),
    }
    return {name: value for name, value in found.items() if value is not None}


def _beams_wire(params: ResolvedParams) -> dict[str, Any]:
    if params.beam_search is None:
        return {}
    length_penalty, ends = params.beam_search
    early_stopping = "never" if ends == "never" else ends == "always"
    return {"use_beam_search": True, "length_penalty": length_penalty, "early_stopping": early_stopping}
