"""8-bit linear maps on a GPU: the input is quantised, together with its norm; then one kernel by a plan, or cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan, plan_for
from oneloop_kernels.ops.fp8_linear.reference import linear as by_reference
from oneloop_kernels.ops.fp8_linear.triton.quantize import quantize
from oneloop_kernels.ops.fp8_linear.triton.tiles import tiles
from oneloop_kernels.ops.linear.launches import Scales, dense, stream
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan, can_stream
from oneloop_kernels.ops.silu_mul.triton import silu_mul

if TYPE_CHECKING:
    from oneloop_kernels.ops.fp8_linear.plans import Plan
    from oneloop_kernels.ops.linear import LinearCall


def linear(call: LinearCall, scales: torch.Tensor) -> torch.Tensor:
    """See ops.fp8_linear.Fp8Linear."""
    device = call.x.device
    if not (INTERPRETED or can_stream(device)):
        return by_reference(call, scales)
    shape = (call.weight.shape[0], call.weight.shape[1], call.gated)
    plan = plan_for(device, call.x.shape[0], shape, by_block=scales.dim() == 2, may_stream=may_stream(call))
    return by_plan(plan, call, scales)


def by_plan(plan: Plan | None, call: LinearCall, scales: torch.Tensor) -> torch.Tensor:
    """The call by one plan; None: cuBLAS. On Hopper; TilesPlan also in the interpreter."""
    quantized = quantize(call.x, norm=call.norm, by_block=scales.dim() == 2)
    inner = call._replace(x=quantized.values, norm=None)
    factors = Scales(quantized.scales, scales, call.x.dtype)
    if isinstance(plan, StreamPlan):
        return stream(plan, inner, factors).run()
    if isinstance(plan, DensePlan):
        return dense(plan, inner, factors).run()
    if isinstance(plan, TilesPlan):
        return tiles(
            inner,
            factors,
            block_m=plan.block_m,
            block_n=plan.block_n,
            stages=plan.num_stages,
            warps=plan.num_warps,
        )
    return many_rows(inner, factors)


def many_rows(call: LinearCall, scales: Scales) -> torch.Tensor:
    """The call, its x quantised, by cuBLAS; scales are per row."""
    out = product(call.x, call.weight, scales, call.bias)
    if call.gated:
        out = silu_mul(out)
    return out if call.residual is None else call.residual.add_(out)


def product(x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias by torch, which has it for results in bfloat16."""
    return torch._scaled_mm(
        x,
        weight.t(),
        scales.x[:, None],
        scales.weight[None, :],
        None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(scales.dtype)


def may_stream(call: LinearCall) -> bool:
    """Whether the copy engine can read the weight and the quantised input, and cuBLAS too: rows at multiples of 16."""
    weight = call.weight
    return weight.shape[1] % 16 == 0 and weight.stride(0) % 16 == 0 and weight.data_ptr() % 16 == 0
