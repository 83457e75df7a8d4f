"""Experts in 8-bit floats on a GPU: what is multiplied with them is quantised, then one kernel for each product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.ops.fp8_linear.triton.quantize import Quantized, quantize
from oneloop_kernels.ops.linear.launches import ROWS_OF_A_WARP, Launch, tensor_map
from oneloop_kernels.ops.moe.launches import (
    combines,
    is_few,
    num_tiles,
    rows_of_few,
    sum_arguments,
    tile_constants,
)
from oneloop_kernels.ops.moe.plans import MAX_FEW, ProductPlan
from oneloop_kernels.ops.moe.triton.fp8 import fp8_experts_kernel

if TYPE_CHECKING:
    from oneloop_kernels.ops.moe import MoeCall
    from oneloop_kernels.ops.moe.launches import Routed
    from oneloop_kernels.ops.moe.plans import MoePlan
    from oneloop_kernels.ops.moe.weights import Fp8Stack

_INSTEAD_OF_GROUPED: Final = ProductPlan("tokens", block_n=64, block_k=128, num_stages=4, num_warps=8)


def products(
    call: MoeCall,
    plan: MoePlan,
    product: ProductPlan,
    routed: Routed,
    x: torch.Tensor,
    weight: Fp8Stack,
    *,
    gated: bool,
) -> Launch:
    """As gpu.gate_up (if gated) and gpu.down. Where the kernel does not quantise x itself, that is launched at once."""
    if product.kind == "grouped":
        if _has_grouped(weight, product):
            return _grouped(call, plan, product, routed, x, weight, gated=gated)
        product = _INSTEAD_OF_GROUPED
    num_tokens, few = call.x.shape[0], is_few(call)
    out_size, in_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    given = Quantized(x, x) if product.quantizes else quantize(x, by_block=weight.by_block)
    out = torch.empty(num_tokens * call.experts.top_k, out_size, dtype=x.dtype, device=x.device)
    combined = not gated and combines(call, plan)
    tensors, strides, around = sum_arguments(call, routed, combined=combined)
    arguments = (
        given.values, given.scales, weight.values, weight.scales, out, routed.ids, routed.weights, routed.bins,
        routed.tiles, call.x, *tensors, call.counters, out_size, x.shape[0], *strides,
    )  # fmt: skip
    constants = {
        **around,
        **tile_constants(call),
        "IN_SIZE": in_size,
        "GATED": gated,
        "BY_BLOCK": weight.by_block,
        "SCALE_ROWS": weight.shape[1] // weight.scales.shape[1],
        "QUANTIZES": product.quantizes,
        "TOKENS_WIDE": product.kind == "tokens",
        "BLOCK_M": rows_of_few(num_tokens, product) if few else plan.block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "STAGES": product.num_stages,
        "PREFETCH": 0 if gated else product.prefetch,
        "num_warps": product.num_warps,
        **pdl_options(x.device),
    }
    grid = (num_tiles(call, plan) * triton.cdiv(out_size, product.block_n),)
    return Launch(fp8_experts_kernel, grid, arguments, constants, out)


def _has_grouped(weight: Fp8Stack, product: ProductPlan) -> bool:
    """Rows are for the copy engine, and a tile's share a scale, or have one each."""
    rows_per_scale = weight.shape[1] // weight.scales.shape[1]
    return weight.shape[2] % 16 == 0 and not (weight.by_block and rows_per_scale % product.block_n)


def _grouped(
    call: MoeCall,
    plan: MoePlan,
    product: ProductPlan,
    routed: Routed,
    x: torch.Tensor,
    weight: Fp8Stack,
    *,
    gated: bool,
) -> Launch:
    """By the kernel of Hopper."""
    from oneloop_kernels.ops.moe.triton.fp8_grouped import fp8_grouped_kernel

    if is_few(call):
        raise ValueError(f"grouped products are for more than {MAX_FEW} tokens")
    out_size, in_size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    given = quantize(x, by_block=weight.by_block)
    num_pairs = call.x.shape[0] * call.experts.top_k
    out = torch.empty(num_pairs, out_size, dtype=x.dtype, device=x.device)
    num_items = num_tiles(call, plan) * -(-out_size // product.block_n)
    arguments = (
        given.values,
        tensor_map(given.values, plan.block_m, product.block_k),
        given.scales,
        tensor_map(weight.values.view(-1, in_size), product.block_n, product.block_k),
        weight.scales,
        out,
        routed.weights,
        routed.bins,
        routed.tiles,
        out_size,
        x.shape[0],
    )
    constants: dict[str, object] = {
        "IN_SIZE": in_size,
        "GATED": gated,
        "BY_BLOCK": weight.by_block,
        "SCALE_ROWS": weight.shape[1] // weight.scales.shape[1],
        "TOP_K": call.experts.top_k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": product.block_n,
        "BLOCK_K": product.block_k,
        "STAGES": product.num_stages,
        "num_warps": plan.block_m // ROWS_OF_A_WARP,
        **pdl_options(x.device),
    }
    return Launch(fp8_grouped_kernel, (min(num_items, num_sms(x.device)),), arguments, constants, out)
