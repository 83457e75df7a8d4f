"""The fields that chat and completions share: sampling, streaming, scheduling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.protocol.fields import shown
from oneloop.engine.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_INT32,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    BeamSearch,
    SamplingParams,
)
from oneloop.errors import RequestError
from oneloop.tokenize.output_text import TextForm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.api.protocol.fields import Fields
    from oneloop.engine.params import ResolvedParams, SamplingDefaults
    from oneloop.engine.structured import GrammarSpec

_SALT = re.compile(r"[!-~]{1,128}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN_ID_KEY = re.compile(r"[0-9]{1,10}")
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a reply is streamed."""

    stream: bool
    include_usage: bool
    """One more chunk with the usage before the end; the others say `"usage": null`."""
    continuous_usage: bool
    """Running usage on every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What the request asks of the queue and the prefix cache."""

    priority: int
    cache_salt: str
    request_id: str | None
    """The client's own id, where it is safe to repeat."""


def read_sampling(
    fields: Fields,
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """The sampling fields as sent: types are checked here, ranges by `check_sampling`.

    n, max_tokens, logprobs, prompt_logprobs, grammar: the routes' own reading of them.
    """
    return SamplingParams(
        n=n,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logprob_token_ids=read_logprob_token_ids(fields, logprobs),
        prompt_logprobs=prompt_logprobs,
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        presence_penalty=fields.number("presence_penalty") or 0.0,
        frequency_penalty=fields.number("frequency_penalty") or 0.0,
        seed=fields.integer("seed"),
        min_tokens=fields.integer("min_tokens") or 0,
        stop=_stop(fields),
        stop_token_ids=_token_ids(fields, "stop_token_ids", MAX_STOP_TOKEN_IDS) or (),
        ignore_eos=fields.flag("ignore_eos", False),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output", False),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        logit_bias=_logit_bias(fields),
        beam_search=_beam_search(fields),
        allowed_token_ids=_token_ids(fields, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
        bad_words=_bad_words(fields),
        deterministic=fields.flag("deterministic", False),
        structured_outputs=grammar,
    )


def read_text_form(fields: Fields) -> TextForm:
    """What of a sampling request's tokens is text, read from the request alone."""
    return TextForm(
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        stop=_stop(fields),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output", False),
        min_tokens=_min_tokens(fields),
    )


def _min_tokens(fields: Fields) -> int:
    """Of a text: the core counts in 32 bits."""
    min_tokens = fields.integer("min_tokens") or 0
    if not 0 <= min_tokens <= MAX_INT32:
        raise fields.refuse("min_tokens", f"must be in 0 … {MAX_INT32}, got {min_tokens}")
    return min_tokens


def check_sampling(
    params: SamplingParams, defaults: SamplingDefaults, limits: Limits, names: Mapping[str, str]
) -> ResolvedParams:
    """Hold every field against its range and fill in the open ones.

    names: the client's word for a field of SamplingParams.
    """
    try:
        return params.resolve(defaults, vocab_size=limits.vocab_size, max_sequences=limits.max_n)
    except RequestError as error:
        field = error.field or ""
        renamed = names.get(field, field)
        raise bad_request(renamed or None, error.message.replace(field, renamed, 1)) from None


def read_logprob_token_ids(fields: Fields, logprobs: int | None) -> tuple[int, ...]:
    """`logprob_token_ids`: tokens that are shown in the place of the likeliest ones. logprobs: what is asked for."""
    ids = _token_ids(fields, "logprob_token_ids", MAX_LOGPROB_TOKEN_IDS) or ()
    if ids and logprobs is None:
        raise fields.refuse("logprob_token_ids", "needs logprobs, which this request does not ask for")
    return ids


def read_prompt_logprobs(fields: Fields, stream: StreamOptions) -> int | None:
    """`prompt_logprobs`; what it may be is checked by `check_sampling`."""
    num_top = fields.integer("prompt_logprobs")
    if num_top is not None and stream.stream:
        raise fields.refuse("prompt_logprobs", "is not available when stream is true")
    return num_top


def read_n(fields: Fields, num_prompts: int, limits: Limits) -> int:
    """`n`, bounded together with the number of prompts before anything is copied."""
    n = fields.integer("n")
    n = 1 if n is None else n
    if n < 1:
        raise fields.refuse("n", f"must be at least 1, got {n}")
    if n * num_prompts > limits.max_sequences:
        raise fields.refuse(
            "n",
            f"times the number of prompts may be at most {limits.max_sequences}, got {shown(n * num_prompts)}",
        )
    return n


def read_stream_options(fields: Fields, limits: Limits) -> StreamOptions:
    """`stream` and `stream_options`."""
    stream = fields.flag("stream", False)
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.refuse("stream_options", "is only allowed together with stream: true")
    nested = fields.inner(options or {}, "stream_options")
    continuous = nested.flag("continuous_usage_stats", False)
    return StreamOptions(
        stream=stream,
        include_usage=nested.flag("include_usage", False) or (stream and limits.force_usage),
        continuous_usage=continuous,
    )


def read_scheduling(fields: Fields, limits: Limits) -> Scheduling:
    """`priority`, `cache_salt`, `request_id`."""
    priority = fields.integer("priority") or 0
    if priority and not limits.priority:
        raise fields.refuse("priority", "needs a server that runs with --scheduling-policy priority")
    if abs(priority) > MAX_PRIORITY:
        raise fields.refuse("priority", f"must be in -{MAX_PRIORITY} … {MAX_PRIORITY}, got {shown(priority)}")
    salt = fields.text("cache_salt")
    if salt is not None and not _SALT.fullmatch(salt):
        raise fields.refuse("cache_salt", "must be 1 to 128 visible ASCII characters")
    request_id = fields.text("request_id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise fields.refuse("request_id", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    return Scheduling(priority=priority, cache_salt=salt or "", request_id=request_id)


def safe_request_id(header: str | None) -> str | None:
    """A client's X-Request-Id, if it is short and plain enough to repeat in headers, ids and logs."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else None


def _beam_search(fields: Fields) -> BeamSearch | None:
    """`use_beam_search`, `length_penalty`, `early_stopping`; `n` is the number of beams."""
    length_penalty = fields.number("length_penalty")
    early_stopping = fields.given("early_stopping")
    if early_stopping is not None and early_stopping != "never":
        early_stopping = fields.flag("early_stopping", False)
    if fields.flag("use_beam_search", False):
        return BeamSearch(
            length_penalty=1.0 if length_penalty is None else length_penalty,
            early_stopping=early_stopping or False,
        )
    if length_penalty not in (None, 1.0):
        raise fields.refuse("length_penalty", "needs use_beam_search: true")
    if early_stopping:
        raise fields.refuse("early_stopping", "needs use_beam_search: true")
    return None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.given("stop")
    if value is None or type(value) is str:
        strings = [] if value is None else [value]
    else:
        strings = fields.array("stop", at_most=MAX_STOP_STRINGS) or []
    for text in strings:
        if type(text) is not str or not text:
            raise fields.refuse("stop", f"must be a non-empty string or a list of such, got {shown(text)}")
    return tuple(strings)


def _token_ids(fields: Fields, key: str, at_most: int) -> tuple[int, ...] | None:
    ids = fields.array(key, at_most=at_most)
    if ids is None:
        return None
    for token in ids:
        if type(token) is not int:
            raise fields.refuse(key, f"must hold integers, got {shown(token)}")
    return tuple(ids)


def _bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.array("bad_words", at_most=MAX_BAD_WORDS) or []
    for word in words:
        if type(word) is not str or not word:
            raise fields.refuse("bad_words", f"must hold non-empty strings, got {shown(word)}")
    return tuple(words)


def _logit_bias(fields: Fields) -> dict[int, float]:
    members = fields.object("logit_bias") or {}
    if len(members) > MAX_LOGIT_BIAS:
        raise fields.refuse("logit_bias", f"may have at most {MAX_LOGIT_BIAS} entries, got {len(members)}")
    return dict(_bias_entry(fields, key, value) for key, value in members.items())


def _bias_entry(fields: Fields, key: str, value: Any) -> tuple[int, float]:
    if not _TOKEN_ID_KEY.fullmatch(key):
        raise fields.refuse("logit_bias", f"must map token ids to numbers, got the key {shown(key)}")
    if type(value) not in (int, float):
        raise fields.refuse("logit_bias", f"must map token ids to numbers, got {shown(value)} for {key}")
    return int(key), float(value)
