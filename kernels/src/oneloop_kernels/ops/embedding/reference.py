"""Embedding rows by torch's own lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    import torch


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See the contract."""
    if weight.device.type != "cpu":  # there torch would stop the device for good
        token_ids = token_ids.clamp(0, weight.shape[0] - 1)
    return F.embedding(token_ids, weight)
