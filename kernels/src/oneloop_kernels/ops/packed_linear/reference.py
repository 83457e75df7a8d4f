"""Packed linear maps in plain torch: every weight is written out, then multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.packed_linear.packing import dequantize
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.packed_linear import PackedCall


def linear(call: PackedCall) -> torch.Tensor:
    """See ops.packed_linear.PackedLinear."""
    x = call.x if call.norm is None else rms_norm(call.x, call.norm.weight, call.norm.eps)
    if call.weight.order is not None:
        x = x.index_select(1, call.weight.order)
    out = F.linear(x, dequantize(call.weight), call.bias)
    if call.gated:
        out = silu_mul(out)
    if call.residual is not None:
        return call.residual.add_(out)
    return out if call.out is None else call.out.copy_(out)
