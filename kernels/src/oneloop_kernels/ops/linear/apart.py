"""A linear map's stages one after the other, by whichever kernels there are for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.rms_norm import RmsNorm
    from oneloop_kernels.ops.silu_mul import SiluMul


class Stages(NamedTuple):
    """product: (x, weight, bias) → x · weightᵀ + bias, a new tensor of any strides."""

    rms_norm: RmsNorm
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    silu_mul: SiluMul


def linear_apart(call: LinearCall, stages: Stages) -> torch.Tensor:
    """See ops.linear.Linear."""
    x = call.x if call.norm is None else stages.rms_norm(call.x, call.norm.weight, call.norm.eps)
    out = stages.product(x, call.weight, call.bias)
    if call.gated:
        out = stages.silu_mul(out)
    return out if call.residual is None else call.residual.add_(out)
