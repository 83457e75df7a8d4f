"""The linear map by torch's own choice of GEMM, its surroundings one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import Norm


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    out = F.linear(x, weight, bias)
    if gated:
        out = silu_mul(out)
    return out if residual is None else residual.add_(out)
