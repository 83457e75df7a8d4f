"""Experts of a few bits on a GPU: their numbers are unpacked in the products, however many tokens there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.linear.launches import Launch
from oneloop_kernels.ops.moe.launches import (
    combines,
    is_few,
    num_tiles,
    rows_of_few,
    sum_arguments,
    tile_constants,
)
from oneloop_kernels.ops.moe.triton.packed import packed_experts_kernel
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from oneloop_kernels.ops.moe import MoeCall
    from oneloop_kernels.ops.moe.launches import Routed
    from oneloop_kernels.ops.moe.packed_stack import PackedStack
    from oneloop_kernels.ops.moe.plans import MoePlan, ProductPlan

_MAX_SUMMED: Final = 16
"""Pairs of a tile up to which sums are scaled: of more there would be more to scale than weights."""


def products(
    call: MoeCall,
    plan: MoePlan,
    product: ProductPlan,
    routed: Routed,
    x: torch.Tensor,
    weight: PackedStack,
    *,
    gated: bool,
) -> Launch:
    """As gpu.gate_up (if gated) and gpu.down. Of the product's plan kind, num_stages and num_warps count."""
    num_tokens, few = call.x.shape[0], is_few(call)
    out_size = weight.rows // weight.halves
    out = torch.empty(num_tokens * call.experts.top_k, out_size, dtype=x.dtype, device=x.device)
    constants: dict[str, object] = {
        "IN_SIZE": weight.columns,
        "GATED": gated,
        "BITS": weight.bits,
        "SHIFT": weight.shift,
        "GROUPS": weight.groups,
        "BLOCK_M": rows_of_few(num_tokens, product) if few else plan.block_m,
        "STAGES": product.num_stages,
    }
    grid = (num_tiles(call, plan) * triton.cdiv(out_size, TILE_ROWS),)
    if product.kind == "grouped":
        if not gated and combines(call, plan):
            raise ValueError("combined: not by the kernel of Hopper for experts of few bits")
        return _by_hopper(call, routed, x, weight, out, grid, constants)
    tensors, strides, around = sum_arguments(call, routed, combined=not gated and combines(call, plan))
    arguments = (
        x,
        weight.words,
        weight.words if weight.high is None else weight.high,
        weight.params.view(weight.dtype),
        weight.words if weight.order is None else weight.order,
        out, routed.ids, routed.weights, routed.bins, routed.tiles, call.x, *tensors, call.counters,
        out_size, x.stride(0), *strides,
    )  # fmt: skip
    constants |= {
        **around,
        **tile_constants(call),
        "HAS_ORDER": weight.order is not None,
        "num_warps": product.num_warps,
        **pdl_options(x.device),
    }
    return Launch(packed_experts_kernel, grid, arguments, constants, out)


def fits_hopper(weight: PackedStack) -> bool:
    """Whether the kernel of Hopper takes such weights: whole tiles of columns, in the order of x's."""
    return weight.columns % TILE_COLUMNS == 0 and weight.order is None


def _by_hopper(
    call: MoeCall,
    routed: Routed,
    x: torch.Tensor,
    weight: PackedStack,
    out: torch.Tensor,
    grid: tuple[int, ...],
    constants: dict[str, object],
) -> Launch:
    from oneloop_kernels.ops.moe.triton.packed_hopper import packed_hopper_kernel

    if not fits_hopper(weight):
        raise ValueError("grouped: whole tiles of columns in x's order are needed")
    arguments = (
        x,
        weight.words,
        weight.words if weight.high is None else weight.high,
        weight.params,
        out, routed.ids, routed.weights, routed.bins, routed.tiles, out.shape[1], x.stride(0), call.x.shape[0],
    )  # fmt: skip
    block_m, tile = constants["BLOCK_M"], tile_constants(call)
    assert isinstance(block_m, int)
    constants = {
        **constants,
        "TOP_K": call.experts.top_k,
        "FEW": tile["FEW"],
        "BY_PAIR": tile["BY_PAIR"],
        "ON_SUMS": weight.bits == 4 and weight.groups == 1 and block_m <= _MAX_SUMMED,
        "num_warps": 4,
        **pdl_options(x.device),
    }
    return Launch(packed_hopper_kernel, grid, arguments, constants, out)
