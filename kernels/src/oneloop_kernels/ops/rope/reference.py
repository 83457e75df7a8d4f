"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See the contract."""
    exchanged = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(exchanged, sin)
