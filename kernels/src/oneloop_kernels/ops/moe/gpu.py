"""Experts on a GPU: routing, gate and up with the activation, down with the routing's weights, the sum into x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.linear.launches import Launch
from oneloop_kernels.ops.moe import NUM_TICKETS, num_counters
from oneloop_kernels.ops.moe.plans import (
    MAX_COMBINED,
    MAX_SCATTERED,
    MoePlan,
    ProductPlan,
    Shape,
    plan_for,
    route_plan,
)
from oneloop_kernels.ops.moe.triton.experts import combine_kernel, experts_kernel
from oneloop_kernels.ops.moe.triton.routing import route_kernel, scatter_kernel

if TYPE_CHECKING:
    from oneloop_kernels.ops.moe import MoeCall

_SQUARES_BLOCK: Final = 256
_SCATTER_BLOCK: Final = 1024
_COMBINE_BLOCK: Final = 1024
_MIN_ROWS: Final = 16
"""Of a matrix product on tensor cores."""


class Routed(NamedTuple):
    """What routing leaves for the experts. P = num_tokens · top_k.

    hidden: [num_tokens, hidden], norm(x). logits: [splits, num_tokens, experts_pad] float32, of which the first has the
    shared gate's column. ids, pairs, ranks: [P] int32. weights: [P] float32. tiles: see `triton.routing._tiles_of`.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    ranks: torch.Tensor
    pairs: torch.Tensor
    tiles: torch.Tensor
    experts_pad: int


def moe(call: MoeCall) -> None:
    """See ops.moe.Moe."""
    if call.x.shape[0]:
        run(call, plan_for(call.x.device, call.x.dtype, call.x.shape[0], shape_of(call)))


def shape_of(call: MoeCall) -> Shape:
    """What a plan is found by."""
    experts = call.experts
    return Shape(experts.num_experts, experts.top_k, call.x.shape[1], experts.width)


def run(call: MoeCall, plan: MoePlan) -> None:
    """The call by that plan."""
    routed = route(call, plan)
    inner = gate_up(call, plan, routed).run()
    outputs = down(call, plan, routed, inner).run()
    if not combines(call, plan):
        combine(call, routed, outputs)


def route(call: MoeCall, plan: MoePlan) -> Routed:
    """One launch, and for many pairs one that puts them in order."""
    x, experts = call.x, call.experts
    num_tokens, hidden = x.shape
    num_rows, num_pairs = experts.router.shape[0], num_tokens * experts.top_k
    if call.counters.numel() < num_counters(experts.num_experts):
        raise ValueError(f"counters: {num_counters(experts.num_experts)} are needed")
    experts_pad = max(_MIN_ROWS, triton.next_power_of_2(num_rows))
    tokens, splits, columns = route_plan(num_tokens, hidden, experts_pad, x.dtype.itemsize)
    most_tiles = plan.most_tiles(num_pairs, experts.num_experts)
    aligned = -(-num_pairs // 4) * 4  # what Triton specialises on, whatever the number of tokens
    ints = torch.empty(3 * aligned + experts_pad + 1 + 3 * most_tiles, dtype=torch.int32, device=x.device)
    ids, ranks, pairs = (ints[start : start + num_pairs] for start in (0, aligned, 2 * aligned))
    routed = Routed(
        torch.empty_like(x),
        torch.empty(splits, num_tokens, experts_pad, dtype=torch.float32, device=x.device),
        ids,
        torch.empty(num_pairs, dtype=torch.float32, device=x.device),
        ranks,
        pairs,
        ints[3 * aligned :],
        experts_pad,
    )
    arguments = (
        x,
        call.norm.weight,
        experts.router,
        x if call.slots is None else call.slots,
        x if call.statistics is None else call.statistics,
        routed.hidden,
        routed.logits,
        ids,
        routed.weights,
        ranks,
        pairs,
        routed.tiles,
        call.counters,
        num_tokens,
        0 if call.slots is None else call.slots.shape[0],
        x.stride(0),
        call.norm.eps,
    )
    scattered = num_pairs <= MAX_SCATTERED
    constants: dict[str, Any] = {
        "HAS_SLOTS": call.slots is not None,
        "HAS_STATISTICS": call.statistics is not None,
        "NUM_EXPERTS": experts.num_experts,
        "NUM_ROWS": num_rows,
        "EXPERTS_PAD": experts_pad,
        "TOP_K": experts.top_k,
        "TOP_K_PAD": triton.next_power_of_2(experts.top_k),
        "RENORMALISED": experts.renormalised,
        "HIDDEN": hidden,
        "BLOCK_M": plan.block_m,
        **pdl_options(x.device),
    }
    route_kernel[(triton.cdiv(num_tokens, tokens) * splits,)](
        *arguments, BLOCK_T=tokens, SPLITS=splits, BLOCK_K=columns, BLOCK_H=_SQUARES_BLOCK,
        ONE_BLOCK=num_tokens <= tokens, ONE_TOKEN=num_tokens == 1, BLOCK_PAIRS=_SCATTER_BLOCK if scattered else 0,
        num_warps=8, num_stages=3, **constants,
    )  # fmt: skip
    if not scattered:
        scatter_kernel[(triton.cdiv(num_pairs, _SCATTER_BLOCK),)](
            ids, ranks, pairs, routed.tiles, num_pairs,
            BLOCK=_SCATTER_BLOCK, num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return routed


def gate_up(call: MoeCall, plan: MoePlan, routed: Routed) -> Launch:
    """silu(gate · h) · (up · h) of every pair, [P, width], by expert."""
    return _products(
        call, plan, plan.gate_up, routed, routed.hidden, call.experts.gate_up, call.experts.width
    )


def down(call: MoeCall, plan: MoePlan, routed: Routed, inner: torch.Tensor) -> Launch:
    """weight(t, e) · down_e(inner) of every pair, [P, hidden], token by token; where the plan `combines` also x."""
    return _products(call, plan, plan.down, routed, inner, call.experts.down, call.x.shape[1])


def combines(call: MoeCall, plan: MoePlan) -> bool:
    """Whether the kernel of down leaves no sum to do."""
    num_tokens, hidden = call.x.shape
    return (
        plan.combined and num_tokens <= MAX_COMBINED and triton.cdiv(hidden, plan.down.block_n) < NUM_TICKETS
    )


def _products(
    call: MoeCall,
    plan: MoePlan,
    product: ProductPlan,
    routed: Routed,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_size: int,
) -> Launch:
    gated = weight is call.experts.gate_up
    num_tokens, num_pairs = call.x.shape[0], routed.pairs.shape[0]
    combined = not gated and combines(call, plan)
    out = torch.empty(num_pairs, out_size, dtype=x.dtype, device=x.device)
    num_tiles = plan.most_tiles(num_pairs, call.experts.num_experts)
    tensors, strides, constants = _sum_arguments(call, routed)
    arguments = (
        x, weight, out, routed.pairs, routed.weights, routed.tiles, call.x, *tensors, call.counters,
        out_size, x.stride(0), *strides,
    )  # fmt: skip
    constants |= {
        "IN_SIZE": weight.shape[2],
        "GATED": gated,
        "ONE_TOKEN": num_tokens == 1,
        "TOKENS_WIDE": product.kind == "tokens",
        "BLOCK_M": plan.block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "PREFETCH": 0 if gated else product.prefetch,
        "COMBINED": max(2, triton.next_power_of_2(num_tokens)) if combined else 0,
        "num_warps": product.num_warps,
        "num_stages": product.num_stages,
        **pdl_options(x.device),
    }
    if not combined:
        constants |= {"HAS_GATE": False, "HAS_SHARED": False, "HAS_SLOTS": False}
    grid = (num_tiles * triton.cdiv(out_size, product.block_n),)
    return Launch(experts_kernel, grid, arguments, constants, out)


def combine(call: MoeCall, routed: Routed, outputs: torch.Tensor) -> None:
    """x += the sum of each token's rows, and the shared expert's."""
    num_tokens, hidden = call.x.shape
    tensors, (_, num_slots, *strides), constants = _sum_arguments(call, routed)
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden))
    combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        outputs, *tensors, call.x, num_tokens, num_slots, hidden, *strides,
        BLOCK=block, num_warps=max(1, block // 256), **constants, **pdl_options(call.x.device),
    )  # fmt: skip


def _sum_arguments(
    call: MoeCall, routed: Routed
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, object]]:
    """Of the sum over a token's experts: tensors (shared, logits, slots), numbers and strides, constants."""
    x, shared, slots = call.x, call.shared, call.slots
    tensors = (x if shared is None else shared, routed.logits, x if slots is None else slots)
    num_slots = 0 if slots is None else slots.shape[0]
    shared_strides = (0, 0) if shared is None else shared.stride()
    constants: dict[str, object] = {
        "NUM_EXPERTS": call.experts.num_experts,
        "EXPERTS_PAD": routed.experts_pad,
        "TOP_K": call.experts.top_k,
        "HAS_GATE": call.experts.has_shared_gate,
        "HAS_SHARED": shared is not None,
        "HAS_SLOTS": slots is not None,
    }
    return tensors, (x.shape[0], num_slots, x.stride(0), *shared_strides), constants
