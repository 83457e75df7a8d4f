"""What a model's logits say of tokens that are given: their log-probabilities and ranks, and the likeliest tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from oneloop_kernels.registry import Family, Implementation


class Scores(NamedTuple):
    """Of n tokens. Columns: the token, then the likeliest ones in order; all are 0 beyond what was asked for.

    ranks: [n] int32, 1 + how many tokens are likelier. token_ids: [n, columns] int32. logprobs: the same in float32.
    """

    ranks: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def allocate(cls, count: int, num_columns: int, device: torch.device) -> Scores:
        """Of `count` tokens, all 0."""
        return cls(
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.zeros(count, num_columns, dtype=torch.int32, device=device),
            torch.zeros(count, num_columns, dtype=torch.float32, device=device),
        )

    def rows(self, part: slice) -> Scores:
        """A view on some of them."""
        return Scores(self.ranks[part], self.token_ids[part], self.logprobs[part])


class ScoreOps(Protocol):
    """Nothing waits for a device."""

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scores: Scores) -> None:
        """Write the log-softmax of row i of the logits, in float32, at token_ids[i] and at its num_top largest.

        logits: [at least n, vocab_size] of any float type; of any strides on the CPU, elsewhere with stride(1) = 1.
        token_ids: [n] integers. num_top: 0 … columns − 1 and vocab_size. scores: of n tokens. Which of equal logits
        come among the largest is left open. Where the row has NaN or +∞ the token gets nothing
        finite.
        """


SCORES: Family[ScoreOps] = Family(
    "scores",
    (
        Implementation("triton", "oneloop_kernels.ops.scores.triton", "TRITON", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.scores.reference", "REFERENCE"),
    ),
)
