"""8-bit linear maps on a GPU: the input is quantised, together with its norm; then one kernel by a plan, or cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.launch import INTERPRETED, generation
from oneloop_kernels.ops.fp8_linear import LEAST_GENERATION, ordered
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan, plan_for
from oneloop_kernels.ops.fp8_linear.reference import linear as by_reference
from oneloop_kernels.ops.fp8_linear.triton.quantize import quantize
from oneloop_kernels.ops.fp8_linear.triton.tiles import tiles
from oneloop_kernels.ops.linear import NUM_TICKETS
from oneloop_kernels.ops.linear.launches import Scales, dense, stream
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan
from oneloop_kernels.ops.silu_mul.triton import silu_mul
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from oneloop_kernels.ops.fp8_linear.plans import Plan
    from oneloop_kernels.ops.linear import LinearCall


class GpuLinear:
    """See ops.fp8_linear.Fp8Linear."""

    def __call__(self, call: LinearCall, scales: torch.Tensor, *, of_gate: bool = False) -> torch.Tensor:
        """See Fp8Linear."""
        if not _has_kernels(call):
            return by_reference(call, scales, of_gate=of_gate)
        return by_plan(_plan_of(call, scales), call, scales, of_gate=of_gate)

    def leaves_gate(self, call: LinearCall, scales: torch.Tensor) -> bool:
        """See Fp8Linear: cuBLAS has no gate, and the next map's quantisation reads what it leaves."""
        return _has_kernels(call) and _plan_of(call, scales) is None


linear: Final = GpuLinear()


def _has_kernels(call: LinearCall) -> bool:
    """Beyond Hopper, tiles alone: Triton has other instructions for them there."""
    return INTERPRETED or generation(call.x.device) >= LEAST_GENERATION


def _plan_of(call: LinearCall, scales: torch.Tensor) -> Plan | None:
    weight = call.weight
    shape = (weight.shape[0], weight.shape[1], call.gated)
    by_block = scales.dim() == 2
    if order_is_fixed():
        return ordered.plan_for(
            call.x.device, call.x.shape[0], shape, by_block=by_block, may_stream=may_stream(call),
            has_tickets=call.tickets is not None and len(call.tickets) >= NUM_TICKETS,
        )  # fmt: skip
    return plan_for(call.x.device, call.x.shape[0], shape, by_block=by_block, may_stream=may_stream(call))


def by_plan(
    plan: Plan | None, call: LinearCall, scales: torch.Tensor, *, of_gate: bool = False
) -> torch.Tensor:
    """The call by one plan; None: cuBLAS. On Hopper; TilesPlan also in the interpreter."""
    quantized = quantize(call.x, norm=call.norm, gated=of_gate, by_block=scales.dim() == 2)
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
