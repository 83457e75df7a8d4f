"""What launches of the experts' products have in common, however their weights are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import triton

from oneloop_kernels.ops.moe import NUM_TICKETS
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.plans import MAX_FEW, Shape
from oneloop_kernels.ops.moe.weights import kind_of
from oneloop_kernels.ops.packed_linear import TILE_ROWS
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.moe import MoeCall
    from oneloop_kernels.ops.moe.plans import MoePlan, ProductPlan

_LEAST_ROWS: Final = {"weights": 8, "tokens": 64, "grouped": 8}
"""Of a tile that has all tokens, by the plan's kind; grouped: of weights of a few bits."""


class Routed(NamedTuple):
    """What routing leaves for the experts. P = num_tokens · top_k.

    hidden: [num_tokens, hidden], norm(x). logits: [splits, num_tokens, experts_pad] float32, of which the first has the
    shared gate's column. ids: [P] int32, −1 for padding. weights: [P] float32. bins, tiles: of many tokens, see
    `triton.routing.route_kernel`; of few the same as ids, which nobody reads there. flags: int32 zeros, one per tile.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    bins: torch.Tensor
    tiles: torch.Tensor
    flags: torch.Tensor
    experts_pad: int


def shape_of(call: MoeCall) -> Shape:
    """What a plan is found by."""
    experts = call.experts
    kinds = (kind_of(experts.gate_up), kind_of(experts.down))
    weights = kinds[0] if kinds[0] == kinds[1] else "+".join(kinds)
    return Shape(experts.num_experts, experts.top_k, call.x.shape[1], experts.width, weights)


def is_few(call: MoeCall) -> bool:
    """Whether nothing is put in order. In the fixed order all numbers of tokens go one way."""
    return call.x.shape[0] <= MAX_FEW and not order_is_fixed()


def num_tiles(call: MoeCall, plan: MoePlan) -> int:
    """As many as there could be."""
    num_pairs, num_experts = call.x.shape[0] * call.experts.top_k, call.experts.num_experts
    return min(num_pairs, num_experts) if is_few(call) else plan.most_tiles(num_pairs, num_experts)


def rows_of_few(num_tokens: int, product: ProductPlan) -> int:
    """Rows of a tile that has all tokens."""
    return max(_LEAST_ROWS[product.kind], 1 << (num_tokens - 1).bit_length())


def tile_constants(call: MoeCall) -> dict[str, object]:
    """Of how a program finds its tile."""
    num_tokens, experts, few = call.x.shape[0], call.experts, is_few(call)
    return {
        "TOP_K_PAD": triton.next_power_of_2(experts.top_k),
        "FEW": few,
        "BY_PAIR": few and num_tokens * experts.top_k <= experts.num_experts,
        "ONE_TOKEN": few and num_tokens == 1,
    }


def combines(call: MoeCall, plan: MoePlan) -> bool:
    """Whether the kernel of down leaves no sum to do."""
    _, hidden = call.x.shape
    block = TILE_ROWS if isinstance(call.experts.down, PackedStack) else plan.down.block_n
    return plan.combined and is_few(call) and triton.cdiv(hidden, block) < NUM_TICKETS


def sum_arguments(
    call: MoeCall, routed: Routed, *, combined: bool
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
        "HAS_GATE": combined and call.experts.has_shared_gate,
        "HAS_SHARED": combined and shared is not None,
        "HAS_SLOTS": combined and slots is not None,
        "COMBINED": max(2, triton.next_power_of_2(x.shape[0])) if combined else 0,
    }
    return tensors, (x.shape[0], num_slots, x.stride(0), *shared_strides), constants
