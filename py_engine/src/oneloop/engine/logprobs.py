"""Encoders of log-probabilities: the core's, so that the relay can write what they make of a step without Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from oneloop_core import LogprobsEncoder, PromptLogprobs, Vocabulary

if TYPE_CHECKING:
    from oneloop.engine.params import ResolvedParams
    from oneloop.tokenize.tokenizer import Tokenizer

__all__ = ["LogprobsEncoder", "PromptLogprobs", "Vocabulary", "make_encoder", "make_encoders"]


def make_encoders(
    tokenizer: Tokenizer,
    form: Literal["chat", "completion"],
    params: ResolvedParams,
    num_sequences: int,
    *,
    vocabulary: Vocabulary | None = None,
) -> list[LogprobsEncoder] | None:
    """One per sequence; None where no log-probabilities are asked for. vocabulary: another one to name tokens by."""
    if params.logprobs is None:
        return None
    names, num_top = vocabulary or tokenizer.vocabulary, params.num_alternatives
    skips = params.skip_special_tokens
    return [
        make_encoder(names, form, num_top=num_top, skip_special_tokens=skips) for _ in range(num_sequences)
    ]


def make_encoder(
    vocabulary: Vocabulary, form: Literal["chat", "completion"], *, num_top: int, skip_special_tokens: bool
) -> LogprobsEncoder:
    """Of one sequence. As LogprobsEncoder."""
    return LogprobsEncoder(vocabulary, form, num_top=num_top, skip_special_tokens=skip_special_tokens)
