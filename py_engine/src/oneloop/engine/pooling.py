"""What a request for a vector is to the engine: a prompt without an answer."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from oneloop.engine.params import ResolvedParams
from oneloop.errors import RequestError

Pooling: TypeAlias = Literal["last", "mean"]
"""Which hidden states, behind the final norm: the last token's, or the mean of all tokens'."""

POOLINGS: Final[tuple[Pooling, ...]] = ("last", "mean")


def pooling_params(pooling: object) -> ResolvedParams:
    """Parameters of a request for a vector. RequestError for a pooling that there is not."""
    for known in POOLINGS:
        if pooling == known:
            return _of(known)
    raise RequestError("pooling", f"pooling must be one of {', '.join(POOLINGS)}")


def _of(pooling: Pooling) -> ResolvedParams:
    return ResolvedParams(
        n=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=None,
        max_tokens=0,
        max_tokens_is_default=False,
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=True,
        include_stop_str_in_output=False,
        skip_special_tokens=True,
        shown_special_ids=(),
        detokenize=False,
        logprobs=None,
        logprob_token_ids=(),
        prompt_logprobs=None,
        logit_bias=(),
        grammar=None,
        allowed_token_ids=None,
        bad_words=(),
        pooling=pooling,
    )
