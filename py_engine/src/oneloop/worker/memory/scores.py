"""Bytes that log-probabilities of prompts take: bounded, since they are computed a few rows at a time. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oneloop.formats.model_spec import ModelSpec

SCORES_AT_ONCE: Final = 64
"""Prompt tokens whose logits exist at a time, on the CPU."""
DEVICE_SCORES_AT_ONCE: Final = 256
"""The same on a GPU: enough that arithmetic binds the product, and not the reading of the head's weights."""
POOLED_AT_ONCE: Final = 256
"""Hidden states that are widened to float32 at a time."""
MAX_SCORES_PER_STEP: Final = 2048
"""Prompt tokens of one step with results, as the core bounds them."""
MAX_PICKS_PER_ROW: Final = 128
"""Tokens that one sample may name, as the core bounds them."""
_COLUMNS: Final = 21
_GROUP: Final = 128
"""Tokens whose maximum is kept."""
_RESULT_BYTES: Final = MAX_SCORES_PER_STEP * (_COLUMNS * 8 + 4)
_CANDIDATES: Final = 2048
"""Places of a row for likely tokens."""


def score_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """The larger of two: logits of SCORES_AT_ONCE rows as the model gives them, in float32, compared (one byte) and
    sorted out by top-k (about another float32); or what is pooled. Beside them the results of a step."""
    logits = SCORES_AT_ONCE * spec.vocab_size * (item_bytes + 4 + 1 + 4)
    return max(logits, _pooled_bytes(spec, item_bytes)) + _RESULT_BYTES


def device_score_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """The same on a GPU: the larger of logits of DEVICE_SCORES_AT_ONCE rows as the model gives them, with a maximum, a
    sum and a number for each group of tokens, a logit and a number for each candidate; or what is pooled."""
    row = spec.vocab_size * item_bytes + -(-spec.vocab_size // _GROUP) * 12 + _CANDIDATES * 8
    return max(DEVICE_SCORES_AT_ONCE * row, _pooled_bytes(spec, item_bytes)) + _RESULT_BYTES


def _pooled_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Hidden states of POOLED_AT_ONCE rows, normalised and widened."""
    return POOLED_AT_ONCE * spec.hidden_size * (2 * item_bytes + 4)
