"""POST /v1/completions: the request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.api.protocol import unsupported
from oneloop.api.protocol.fields import Fields, shown, token_ids
from oneloop.api.protocol.prompt_fields import AskedTruncation, ToldBack, read_told_back, read_truncation
from oneloop.api.protocol.sampling import (
    Scheduling,
    StreamOptions,
    check_sampling,
    read_logprob_token_ids,
    read_n,
    read_prompt_logprobs,
    read_sampling,
    read_scheduling,
    read_stream_options,
)
from oneloop.api.protocol.structured import read_structured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.limits import Limits
    from oneloop.engine.params import ResolvedParams, SamplingDefaults

DEFAULT_MAX_TOKENS = 16
"""The protocol's own, whatever the model's generation_config says."""
_FORMS = "a non-empty string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What a checked request asks for its prompts: everything past this point is in range."""

    model: str | None
    params: ResolvedParams
    """max_tokens is 0 only where log-probabilities of the prompts are asked for, see `score_only`."""
    score_only: bool
    """Nothing is to be computed: no new tokens, and no log-probabilities."""
    echo: bool
    shown_prompt_logprobs: int | None
    """The client's own `prompt_logprobs`. An echo with logprobs asks the engine for them too."""
    add_special_tokens: bool
    truncation: AskedTruncation | None
    told_back: ToldBack
    stream: StreamOptions
    scheduling: Scheduling
    ignored: list[str]
    """Fields that had no effect."""

    @property
    def echoes_tokens(self) -> bool:
        """Whether the echo has log-probabilities."""
        return self.echo and self.params.logprobs is not None


def read_completion(
    members: Mapping[str, Any], num_prompts: int, limits: Limits, defaults: SamplingDefaults
) -> CompletionRequest:
    """Check a body but for its prompts. ApiError (400) naming the field."""
    fields = Fields(members)
    model = fields.text("model")
    stream = read_stream_options(fields, limits)
    max_tokens = fields.integer("max_tokens")
    logprobs = fields.integer("logprobs")
    if read_logprob_token_ids(fields, logprobs):
        logprobs = 0  # these are shown, instead of the likeliest ones
    echo = fields.flag("echo", False)
    shown_prompt_logprobs = read_prompt_logprobs(fields, stream)
    prompt_logprobs = _wanted_of_prompts(echo, logprobs, shown_prompt_logprobs)
    n = read_n(fields, num_prompts, limits)
    _read_best_of(fields, n)
    min_tokens = fields.integer("min_tokens") or 0
    score_only = max_tokens == 0 and prompt_logprobs is None
    if max_tokens == 0 and min_tokens:
        raise fields.refuse("min_tokens", f"({min_tokens}) is above max_tokens (0)")
    defaults = replace(defaults, max_tokens=max(DEFAULT_MAX_TOKENS, min_tokens))
    grammar, without_effect = read_structured(fields)
    asked = read_sampling(
        fields,
        n=n,
        max_tokens=1 if score_only else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    names = {} if shown_prompt_logprobs is not None else {"prompt_logprobs": "logprobs"}
    params = check_sampling(asked, defaults, limits, names)
    scheduling = read_scheduling(fields, limits)
    add_special_tokens = fields.flag("add_special_tokens", True)
    truncation = read_truncation(fields, limits)
    told_back = read_told_back(fields)
    unsupported.refuse_unsupported(fields, unsupported.COMPLETION)
    return CompletionRequest(
        model=model,
        params=params,
        score_only=score_only,
        echo=echo,
        shown_prompt_logprobs=shown_prompt_logprobs,
        add_special_tokens=add_special_tokens,
        truncation=truncation,
        told_back=told_back,
        stream=stream,
        scheduling=scheduling,
        ignored=without_effect + fields.unread(),
    )


def _wanted_of_prompts(echo: bool, logprobs: int | None, shown: int | None) -> int | None:
    """Log-probabilities per prompt token that the reply needs: an echo with logprobs shows the prompt's too."""
    if not echo or logprobs is None:
        return shown
    if shown is None or shown == -1:
        return logprobs if shown is None else shown
    return max(logprobs, shown)


def read_prompts(value: object, limits: Limits, field: str = "prompt") -> list[str | list[int]]:
    """Texts, or token ids in range; at least one, none empty. ApiError (400) naming the field.

    value: one string, a list of strings, one list of ids, or a list of such. field: its name.
    """
    if type(value) is str:
        return [_text_prompt(field, value)]
    if type(value) is not list or not value:
        raise bad_request(field, f"{field} must be {_FORMS}, got {shown(value)}")
    if type(value[0]) is int:
        return [token_ids(field, value, limits.vocab_size, at_most=limits.max_model_len)]
    if len(value) > limits.max_sequences:
        raise bad_request(field, f"{field} may hold at most {limits.max_sequences} prompts, got {len(value)}")
    return [_prompt(f"{field}[{index}]", entry, type(value[0]), limits) for index, entry in enumerate(value)]


def _prompt(name: str, entry: Any, kind: type, limits: Limits) -> str | list[int]:
    if kind is str and type(entry) is str:
        return _text_prompt(name, entry)
    if kind is list and type(entry) is list:
        return token_ids(name, entry, limits.vocab_size, at_most=limits.max_model_len)
    raise bad_request(name, f"{name.partition('[')[0]} must be {_FORMS}; {name} is {shown(entry)}")


def _text_prompt(name: str, text: str) -> str:
    if not text:
        raise bad_request(name, f"{name} must not be empty")
    return text


def _read_best_of(fields: Fields, n: int) -> None:
    """Taken where it asks for nothing: as many candidates as answers."""
    best_of = fields.integer("best_of")
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise fields.refuse("best_of", f"must be at least n ({n}), got {best_of}")
    raise fields.refuse("best_of", "above n is not supported yet")
