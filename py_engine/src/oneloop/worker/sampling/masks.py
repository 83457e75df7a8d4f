"""The masks of a step's samples, as the CPU's sampler uses them.

Most masks of structured output let very few tokens come, or forbid very few. So the fewer ones are listed, and a sample
that may get few tokens looks at nothing else.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_CANDIDATES = (16, 256)
"""Samples with so many allowed tokens at most are listed together; one with more looks at all."""
_MAX_BANNED_SHARE = 1 / 16
"""Of the vocabulary: of more tokens a list takes longer than the mask itself."""


class Candidates(NamedTuple):
    """Samples that may get few tokens: samples [n], token_ids [n, m] in ascending order, is_token [n, m]: false where a
    row is filled up (with id 0)."""

    samples: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    is_token: npt.NDArray[np.bool_]


class StepMasks(NamedTuple):
    """The masks of a step, by what is to be done with them.

    few: samples that may get few tokens, each once. banned: (samples, token ids), both [n]: pairs that must not come.
    masked: the samples [n] that are left, words their masks, [n, ceil(vocab_size / 32)] uint32.
    """

    few: list[Candidates]
    banned: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    masked: npt.NDArray[np.int64]
    words: npt.NDArray[np.uint32]


def sort_masks(samples: npt.NDArray[np.int64], words: npt.NDArray[np.uint32], vocab_size: int) -> StepMasks:
    """words: [len(samples), ceil(vocab_size / 32)], the masks of the samples; no bit beyond vocab_size is set."""
    num_allowed = np.bitwise_count(words).sum(1, dtype=np.int64)
    has_few = num_allowed <= MAX_CANDIDATES[-1]
    bans_few = ~has_few & (num_allowed >= vocab_size * (1 - _MAX_BANNED_SHARE))
    rows, token_ids = _bits_set(~words[bans_few])
    real = token_ids < vocab_size
    rest = ~(has_few | bans_few)
    limits = (-1, *MAX_CANDIDATES)
    parts = [(num_allowed > low) & (num_allowed <= high) for low, high in pairwise(limits)]
    return StepMasks(
        few=[_candidates(samples[part], words[part], num_allowed[part]) for part in parts if part.any()],
        banned=(samples[bans_few][rows[real]], token_ids[real]),
        masked=samples[rest],
        words=words[rest],
    )


def _candidates(
    samples: npt.NDArray[np.int64], words: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]
) -> Candidates:
    rows, token_ids = _bits_set(words)
    # A row without a token keeps a place, so that it has a largest logit (−∞).
    padded = np.zeros((len(samples), max(1, int(counts.max(initial=0)))), np.int64)
    is_token = np.arange(padded.shape[1]) < counts[:, None]
    starts = counts.cumsum() - counts
    padded[rows, np.arange(len(rows)) - starts[rows]] = token_ids
    return Candidates(samples, padded, is_token)


def _bits_set(words: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(row, number within the row) of every bit that is set, in order. words: [n, m], lowest bit first."""
    rows, columns = np.nonzero(words)
    bits = np.flatnonzero(np.unpackbits(words[rows, columns].astype("<u4").view(np.uint8), bitorder="little"))
    places = bits >> 5
    return rows[places], columns[places] * 32 + (bits & 31)
