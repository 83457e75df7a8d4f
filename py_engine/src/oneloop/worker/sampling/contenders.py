"""The tokens that each of some samples may get, with their logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from oneloop_kernels.ops.sampling import Draws, SamplingOps


class Contenders(NamedTuple):
    """logits: [n, m] float32; token_ids: [n, m] int64 whose they are, each once a row, and any where the logit is −∞.

    token_ids None: those of the tokens 0 … m − 1.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Contenders:
        """Those of some samples. index: [k] int64, each at most once, in ascending order."""
        if len(index) == len(self.logits):
            return self
        token_ids = None if self.token_ids is None else self.token_ids.index_select(0, index)
        return Contenders(self.logits.index_select(0, index), token_ids)

    def likeliest(self, ops: SamplingOps) -> torch.Tensor:
        """[n] int64; −1 for a sample without a distribution, here and below."""
        best = ops.likeliest(self.logits)
        if self.token_ids is None:
            return best
        tokens = self.token_ids.gather(1, best.clamp(min=0)[:, None]).squeeze(1)
        return tokens.masked_fill_(best < 0, -1)

    def draw(self, ops: SamplingOps, draws: Draws) -> torch.Tensor:
        """[n] int64. The logits are overwritten."""
        if self.token_ids is None:
            return ops.draw(self.logits, draws)
        return ops.draw_among(self.logits, self.token_ids, draws)
