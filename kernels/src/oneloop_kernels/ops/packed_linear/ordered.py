"""Packed linear maps in the fixed order (oneloop_kernels.order): linear.ordered's, of the weight written out.

The kernel that unpacks in the product is not used: on an H200, with groups of 16 and 32 columns, its bits differed from
those of the weight written out. It overwrote operands of products in flight then, which would do that; what it does now
has been compiled and looked at, and no device has run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop_kernels.launch import one_after_another
from oneloop_kernels.ops.linear import LinearCall
from oneloop_kernels.ops.linear.ordered import linear as plain_linear
from oneloop_kernels.ops.packed_linear.launches import prepared, unpacked

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.packed_linear import PackedCall


def linear(call: PackedCall) -> torch.Tensor:
    """See ops.packed_linear.PackedLinear: a row of the result depends on that row of x alone, bit by bit."""
    call = prepared(call)
    weight = unpacked(call.weight).run()
    plain = LinearCall(
        call.x, weight, call.bias, gated=call.gated, residual=call.residual, tickets=call.tickets
    )
    with one_after_another():
        result = plain_linear(plain)
    return result if call.out is None or call.residual is not None else call.out.copy_(result)
