"""Packed linear maps in the fixed order (oneloop_kernels.order): linear.ordered's, of the weight written out.

The kernel that unpacks in the product has not the same bits for all numbers of rows: on an H200, groups of 16 and 32
columns differ between tiles of 32 and of 64 rows of x, and a small GPTQ model's answers between batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop_kernels.ops.linear import LinearCall
from oneloop_kernels.ops.linear.ordered import linear as plain_linear
from oneloop_kernels.ops.packed_linear.launches import prepared, unpacked

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.packed_linear import PackedCall


def linear(call: PackedCall) -> torch.Tensor:
    """See ops.packed_linear.PackedLinear: a row of the result depends on that row of x alone, bit by bit."""
    call = prepared(call)
    result = plain_linear(
        LinearCall(
            call.x,
            unpacked(call.weight).run(),
            call.bias,
            gated=call.gated,
            residual=call.residual,
            tickets=call.tickets,
        )
    )
    return result if call.out is None or call.residual is not None else call.out.copy_(result)
