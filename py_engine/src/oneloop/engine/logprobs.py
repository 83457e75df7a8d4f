"""Encoders of log-probabilities: the core's, so that the relay can write what they make of a step without Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from oneloop_core import LogprobsEncoder, PromptLogprobs

if TYPE_CHECKING:
    from oneloop.engine.params import ResolvedParams
    from oneloop.tokenize.tokenizer import Tokenizer

__all__ = ["LogprobsEncoder", "PromptLogprobs", "make_encoders"]


def make_encoders(
    tokenizer: Tokenizer, form: Literal["chat", "completion"], params: ResolvedParams, num_sequences: int
) -> list[LogprobsEncoder] | None:
    """One per sequence; None where no log-probabilities are asked for."""
    if params.logprobs is None:
        return None
    return [
        LogprobsEncoder(
            tokenizer.vocabulary,
            form,
            num_top=params.logprobs,
            skip_special_tokens=params.skip_special_tokens,
        )
        for _ in range(num_sequences)
    ]
