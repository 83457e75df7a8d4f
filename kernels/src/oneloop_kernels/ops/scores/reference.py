"""Scores in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.sampling.reference import REFERENCE as SAMPLING_REFERENCE

if TYPE_CHECKING:
    from oneloop_kernels.ops.scores import Scores


class ReferenceScoreOps:
    """See the contract."""

    __slots__ = ()

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scores: Scores) -> None:
        """See the contract."""
        wide = logits[: len(token_ids)].to(torch.float32)
        top = SAMPLING_REFERENCE.top_logprobs(wide, token_ids.to(torch.int64), num_top)
        scores.ranks.copy_(top.ranks)
        scores.token_ids[:, : num_top + 1] = top.token_ids
        scores.logprobs[:, : num_top + 1] = top.logprobs


REFERENCE: Final = ReferenceScoreOps()
