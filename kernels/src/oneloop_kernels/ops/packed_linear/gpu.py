"""Packed linear maps on a GPU: unpacked in the product where rows are few, else written out for cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop_kernels.ops.linear import LinearCall
from oneloop_kernels.ops.linear.gpu import many_rows
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import ordered
from oneloop_kernels.ops.packed_linear.launches import few_rows, may_stream, prepared, stream, unpacked
from oneloop_kernels.ops.packed_linear.plans import MAX_FEW_ROWS, plan_for
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.packed_linear import PackedCall


def linear(call: PackedCall) -> torch.Tensor:
    """See ops.packed_linear.PackedLinear."""
    if order_is_fixed():
        return ordered.linear(call)
    num_tokens = call.x.shape[0]
    plan = plan_for(call.weight, num_tokens, gated=call.gated, may_split=call.tickets is not None)
    call = prepared(call)
    readable = may_stream(call)
    if plan is not None and readable:
        return stream(plan, call).run()
    if num_tokens <= MAX_FEW_ROWS and not (readable and can_stream(call.x.device)):
        return few_rows(call).run()
    return written_out(call)


def written_out(call: PackedCall) -> torch.Tensor:
    """A `prepared` call by cuBLAS."""
    weight = unpacked(call.weight).run()
    plain = LinearCall(
        call.x, weight, call.bias, gated=call.gated, residual=call.residual, tickets=call.tickets
    )
    result = many_rows(plain)
    return result if call.out is None or call.residual is not None else call.out.copy_(result)
