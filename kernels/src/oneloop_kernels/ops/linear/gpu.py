"""Linear maps on a GPU: one kernel by a plan, or norm, cuBLAS and activation one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.ops.linear.apart import Stages, linear_apart
from oneloop_kernels.ops.linear.launches import may_stream, planned
from oneloop_kernels.ops.linear.ordered import linear as ordered_linear
from oneloop_kernels.ops.linear.plans import plan_for
from oneloop_kernels.ops.rms_norm.triton import rms_norm
from oneloop_kernels.ops.silu_mul.triton import silu_mul
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall


def linear(call: LinearCall) -> torch.Tensor:
    """See ops.linear.Linear."""
    if order_is_fixed():
        return ordered_linear(call)
    x, weight = call.x, call.weight
    plan = plan_for(
        x.device,
        x.dtype,
        x.shape[0],
        (weight.shape[0], weight.shape[1], call.gated),
        may_split=call.tickets is not None,
        may_stream=may_stream(x, weight),
    )
    return many_rows(call) if plan is None else planned(plan, call).run()


def many_rows(call: LinearCall) -> torch.Tensor:
    """The contract by cuBLAS, which adds the residual where there is no bias beside it."""
    if call.residual is None or call.bias is not None or call.gated:
        return linear_apart(call, _STAGES)
    x = call.x if call.norm is None else rms_norm(call.x, call.norm.weight, call.norm.eps)
    return call.residual.addmm_(x, call.weight.t())


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


_STAGES: Final = Stages(rms_norm, _product, silu_mul)
