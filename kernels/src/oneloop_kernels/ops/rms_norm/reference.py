"""RMS normalisation in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See the contract."""
    if residual is not None:
        x = residual.add_(x)
    if x.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # the same bits as below, in one call
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype)
