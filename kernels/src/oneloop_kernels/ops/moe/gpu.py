"""Experts on a GPU: routing, gate and up with the activation, down with the routing's weights, the sum into x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.ops.linear.launches import ROWS_OF_A_WARP, Launch, tensor_map
from oneloop_kernels.ops.moe import fp8, num_counters, packed
from oneloop_kernels.ops.moe.launches import (
    Routed,
    combines,
    is_few,
    num_tiles,
    rows_of_few,
    shape_of,
    sum_arguments,
    tile_constants,
)
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.plans import MAX_FEW, MoePlan, ProductPlan, RoutePlan, plan_for, route_plan
from oneloop_kernels.ops.moe.triton.experts import both_kernel, combine_kernel, experts_kernel
from oneloop_kernels.ops.moe.triton.routing import TABLE, route_kernel
from oneloop_kernels.ops.moe.weights import Fp8Stack
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from oneloop_kernels.ops.moe import MoeCall

_SQUARES_BLOCK: Final = 256
_COMBINE_BLOCK: Final = 1024
_MIN_ROWS: Final = 16
"""Of a matrix product on tensor cores."""


def moe(call: MoeCall) -> None:
    """See ops.moe.Moe."""
    num_tokens = call.x.shape[0]
    if num_tokens:
        fixed = order_is_fixed()
        least = MAX_FEW + 1 if fixed else 1  # few tokens have products of other instructions
        run(call, plan_for(call.x.device, call.x.dtype, max(num_tokens, least), shape_of(call), fixed=fixed))


def run(call: MoeCall, plan: MoePlan) -> None:
    """The call by that plan."""
    routed = route(call, plan)
    if plan.together:
        outputs = both(call, plan, routed).run()
    else:
        inner = gate_up(call, plan, routed).run()
        outputs = down(call, plan, routed, inner).run()
    if not combines(call, plan):
        combine(call, routed, outputs)


def route(call: MoeCall, plan: MoePlan, cut: RoutePlan | None = None) -> Routed:
    """One launch. cut: instead of the one that is chosen by the number of tokens."""
    x, experts = call.x, call.experts
    num_tokens, hidden = x.shape
    if call.counters.numel() < num_counters(experts.num_experts):
        raise ValueError(f"counters: {num_counters(experts.num_experts)} are needed")
    num_rows = experts.router.shape[0]
    experts_pad = max(_MIN_ROWS, triton.next_power_of_2(num_rows))
    cut = cut or route_plan(num_tokens, hidden, experts_pad, x.dtype.itemsize, fixed=order_is_fixed())
    routed = _routed(call, plan, cut, experts_pad)
    arguments = (
        x, call.norm.weight, experts.router,
        x if call.slots is None else call.slots,
        x if call.statistics is None else call.statistics,
        routed.hidden, routed.logits, routed.ids, routed.weights, routed.bins, routed.tiles, routed.flags,
        call.counters, routed.flags.numel(), num_tokens, 0 if call.slots is None else call.slots.shape[0],
        x.stride(0), call.norm.eps,
    )  # fmt: skip
    route_kernel[(triton.cdiv(num_tokens, cut.tokens) * cut.splits,)](
        *arguments,
        HAS_SLOTS=call.slots is not None,
        HAS_STATISTICS=call.statistics is not None,
        NUM_EXPERTS=experts.num_experts,
        NUM_ROWS=num_rows,
        EXPERTS_PAD=experts_pad,
        TOP_K=experts.top_k,
        TOP_K_PAD=triton.next_power_of_2(experts.top_k),
        RENORMALISED=experts.renormalised,
        HIDDEN=hidden,
        BLOCK_T=cut.tokens,
        SPLITS=cut.splits,
        BLOCK_K=cut.columns,
        BLOCK_H=_SQUARES_BLOCK,
        FEW=is_few(call),
        BLOCK_M=plan.block_m,
        num_warps=8,
        num_stages=3,
        **pdl_options(x.device),
    )
    return routed


def _routed(call: MoeCall, plan: MoePlan, cut: RoutePlan, experts_pad: int) -> Routed:
    """Uninitialised."""
    num_tokens, device = call.x.shape[0], call.x.device
    num_experts, num_pairs = call.experts.num_experts, num_tokens * call.experts.top_k
    ids = torch.empty(num_pairs, dtype=torch.int32, device=device)
    bins = tiles = ids
    num_flags = -(-num_tiles(call, plan) // 4) * 4  # so that what lies behind is at 16 bytes
    flags = torch.empty(num_flags, dtype=torch.int32, device=device)
    if not is_few(call):
        table_size = TABLE.value + 4 * num_flags
        tables = torch.empty(
            num_flags + table_size + num_experts * num_tokens, dtype=torch.int32, device=device
        )
        flags, tiles = tables[:num_flags], tables[num_flags : num_flags + table_size]
        bins = tables[num_flags + table_size :]
    return Routed(
        torch.empty_like(call.x),
        torch.empty(cut.splits, num_tokens, experts_pad, dtype=torch.float32, device=device),
        ids,
        torch.empty(num_pairs, dtype=torch.float32, device=device),
        bins,
        tiles,
        flags,
        experts_pad,
    )


def gate_up(call: MoeCall, plan: MoePlan, routed: Routed) -> Launch:
    """silu(gate · h) · (up · h) of every pair, [P, width]: of few tokens in their order, of many by expert."""
    return _products_of(call, plan, routed, routed.hidden, gated=True)


def down(call: MoeCall, plan: MoePlan, routed: Routed, inner: torch.Tensor) -> Launch:
    """weight(t, e) · down_e(inner) of every pair, [P, hidden], token by token; where the plan `combines` also x."""
    return _products_of(call, plan, routed, inner, gated=False)


def _products_of(call: MoeCall, plan: MoePlan, routed: Routed, x: torch.Tensor, *, gated: bool) -> Launch:
    """By the kernels for how the weights are kept. gated: gate and up of x, else down."""
    weight = call.experts.gate_up if gated else call.experts.down
    product = plan.gate_up if gated else plan.down
    if isinstance(weight, Fp8Stack):
        return fp8.products(call, plan, product, routed, x, weight, gated=gated)
    if isinstance(weight, PackedStack):
        return packed.products(call, plan, product, routed, x, weight, gated=gated)
    out_size = weight.shape[1] // (2 if gated else 1)
    return _products(call, plan, product, routed, x, weight, out_size)


def _products(
    call: MoeCall,
    plan: MoePlan,
    product: ProductPlan,
    routed: Routed,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_size: int,
) -> Launch:
    if product.kind == "grouped":
        return _grouped(call, plan, product, routed, x, weight)
    gated = weight is call.experts.gate_up
    num_tokens = call.x.shape[0]
    combined = not gated and combines(call, plan)
    out = torch.empty(num_tokens * call.experts.top_k, out_size, dtype=x.dtype, device=x.device)
    tensors, strides, around = sum_arguments(call, routed, combined=combined)
    arguments = (
        x, weight, out, routed.ids, routed.weights, routed.bins, routed.tiles, call.x, *tensors, call.counters,
        out_size, x.stride(0), *strides,
    )  # fmt: skip
    constants = {
        **around,
        **tile_constants(call),
        "IN_SIZE": weight.shape[2],
        "GATED": gated,
        "TOKENS_WIDE": product.kind == "tokens",
        "BLOCK_M": rows_of_few(num_tokens, product) if is_few(call) else plan.block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "STAGES": product.num_stages,
        "PREFETCH": 0 if gated else product.prefetch,
        "num_warps": product.num_warps,
        **pdl_options(x.device),
    }
    grid = (num_tiles(call, plan) * triton.cdiv(out_size, product.block_n),)
    return Launch(experts_kernel, grid, arguments, constants, out)


def both(call: MoeCall, plan: MoePlan, routed: Routed) -> Launch:
    """gate_up and down by one kernel, of plain weights; the result as of `down`."""
    if not (isinstance(call.experts.gate_up, torch.Tensor) and isinstance(call.experts.down, torch.Tensor)):
        raise TypeError("together: plans of plain weights alone have this kernel")
    (num_tokens, hidden), experts = call.x.shape, call.experts
    first, second = plan.gate_up, plan.down
    few, most_tiles = is_few(call), num_tiles(call, plan)
    inner = torch.empty(num_tokens * experts.top_k, experts.width, dtype=call.x.dtype, device=call.x.device)
    out = torch.empty(num_tokens * experts.top_k, hidden, dtype=call.x.dtype, device=call.x.device)
    tensors, strides, around = sum_arguments(call, routed, combined=combines(call, plan))
    arguments = (
        routed.hidden, experts.gate_up, inner, experts.down, out, routed.ids, routed.weights, routed.bins, routed.tiles,
        routed.flags, call.x, *tensors, call.counters, most_tiles, *strides,
    )  # fmt: skip
    constants = {
        **around,
        **tile_constants(call),
        "HIDDEN": hidden,
        "WIDTH": experts.width,
        "BLOCK_M": max(rows_of_few(num_tokens, one) for one in (first, second)) if few else plan.block_m,
        "GATE_WIDE": first.kind == "tokens",
        "GATE_N": first.block_n,
        "GATE_K": first.block_k,
        "GATE_STAGES": first.num_stages,
        "DOWN_WIDE": second.kind == "tokens",
        "DOWN_N": second.block_n,
        "DOWN_K": second.block_k,
        "DOWN_STAGES": second.num_stages,
        "PREFETCH": second.prefetch,
        "num_warps": second.num_warps,
        **pdl_options(call.x.device),
    }
    grid = (most_tiles * (triton.cdiv(experts.width, first.block_n) + triton.cdiv(hidden, second.block_n)),)
    return Launch(both_kernel, grid, arguments, constants, out)


def _grouped(
    call: MoeCall, plan: MoePlan, product: ProductPlan, routed: Routed, x: torch.Tensor, weight: torch.Tensor
) -> Launch:
    """By the kernel of Hopper."""
    from oneloop_kernels.ops.moe.triton.grouped import grouped_kernel

    if is_few(call):
        raise ValueError(f"grouped products are for more than {MAX_FEW} tokens")
    gated = weight is call.experts.gate_up
    out_size, in_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    num_pairs, device = call.x.shape[0] * call.experts.top_k, x.device
    out = torch.empty(num_pairs, out_size, dtype=x.dtype, device=device)
    num_items = num_tiles(call, plan) * -(-out_size // product.block_n)
    arguments = (
        x,
        tensor_map(x, plan.block_m, product.block_k),
        tensor_map(weight.view(-1, in_size), product.block_n, product.block_k),
        out,
        routed.weights,
        routed.bins,
        routed.tiles,
        out_size,
    )
    constants: dict[str, object] = {
        "IN_SIZE": in_size,
        "GATED": gated,
        "TOP_K": call.experts.top_k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "STAGES": product.num_stages,
        "num_warps": plan.block_m // ROWS_OF_A_WARP,
        **pdl_options(device),
    }
    return Launch(grouped_kernel, (min(num_items, num_sms(device)),), arguments, constants, out)


def combine(call: MoeCall, routed: Routed, outputs: torch.Tensor) -> None:
    """x += the sum of each token's rows, and the shared expert's."""
    num_tokens, hidden = call.x.shape
    tensors, (_, num_slots, *strides), constants = sum_arguments(call, routed, combined=True)
    del constants["COMBINED"]
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        outputs, *tensors, call.x, num_tokens, num_slots, hidden, *strides,
        BLOCK=block, num_warps=max(1, block // 256), **constants, **pdl_options(call.x.device),
    )  # fmt: skip
