"""The 8-bit linear map in tiles, for any number of rows and any card, everything after the product fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.linear.launches import Scales

_GROUPED = 8
"""Tiles of rows that go through the same weights one after the other, so that those come from the cache."""


@triton.jit(do_not_specialize=["num_tokens"])
def tiles_kernel(
    x_ptr, weight_ptr, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
    num_tokens, in_size, out_size, weight_stride, out_stride,
    BY_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUPED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = x · Wᵀ + bias, or that product itself.

    x: [num_tokens, in_size] contiguous. Scales: as launches.Scales; BLOCK_K is a block of inputs. Grid: one per tile.
    """
    row_tiles, column_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_size, BLOCK_N)
    together = tl.minimum(GROUPED, row_tiles)
    first = tl.program_id(0) // (together * column_tiles) * together
    height = tl.minimum(row_tiles - first, together)
    place = tl.program_id(0) % (together * column_tiles)
    tokens = (first + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_tokens = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    safe_columns = tl.minimum(columns, out_size - 1)
    num_blocks = tl.cdiv(in_size, BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = gate
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_places = x_ptr + safe_tokens[:, None] * in_size
    gate_places = weight_ptr + safe_columns[None, :].to(tl.int64) * weight_stride
    up_places = gate_places + tl.cast(out_size, tl.int64) * weight_stride
    for block in range(num_blocks):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_places + k[None, :], mask=(k < in_size)[None, :], other=0.0)
        weight = tl.load(gate_places + k[:, None], mask=(k < in_size)[:, None], other=0.0)
        if BY_BLOCK:
            x_scales = tl.load(x_scales_ptr + block * num_tokens + safe_tokens)
            scales = _block_scales(
                weight_scales_ptr + block, x_scales, columns, num_blocks, out_size, SCALE_ROWS, BLOCK_N
            )
            gate += tl.dot(x, weight) * scales
        else:
            gate = tl.dot(x, weight, gate)
        if GATED:
            weight = tl.load(up_places + k[:, None], mask=(k < in_size)[:, None], other=0.0)
            if BY_BLOCK:
                up_scales_ptr = weight_scales_ptr + out_size // SCALE_ROWS * num_blocks + block
                scales = _block_scales(
                    up_scales_ptr, x_scales, columns, num_blocks, out_size, SCALE_ROWS, BLOCK_N
                )
                up += tl.dot(x, weight) * scales
            else:
                up = tl.dot(x, weight, up)
    if not BY_BLOCK:
        x_scales = tl.load(x_scales_ptr + safe_tokens)[:, None]
        gate *= x_scales * tl.load(weight_scales_ptr + safe_columns)[None, :]
        if GATED:
            up *= x_scales * tl.load(weight_scales_ptr + out_size + safe_columns)[None, :]
    if HAS_BIAS:
        gate += tl.load(bias_ptr + safe_columns).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + out_size + safe_columns).to(tl.float32)[None, :]
    if GATED:
        gate = silu_mul_tile(gate, up)
    places = out_ptr + tokens[:, None].to(tl.int64) * out_stride + columns[None, :]
    mask = (tokens < num_tokens)[:, None] & (columns < out_size)[None, :]
    if HAS_RESIDUAL:
        gate += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, gate.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block_scales(
    scales_ptr, x_scales, columns, num_blocks, out_size, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Of the products of a block: [BLOCK_M, BLOCK_N], or [BLOCK_M, 1] where a tile's weights share one."""
    if SCALE_ROWS % BLOCK_N == 0:
        scale = tl.load(scales_ptr + tl.min(columns, 0) // SCALE_ROWS * num_blocks)
        scales = (x_scales * scale)[:, None]
    else:
        scale = tl.load(scales_ptr + tl.minimum(columns, out_size - 1) // SCALE_ROWS * num_blocks)
        scales = x_scales[:, None] * scale[None, :]
    return scales


def tiles(
    call: LinearCall,
    scales: Scales,
    *,
    block_m: int = 128,
    block_n: int = 128,
    stages: int = 4,
    warps: int = 8,
) -> torch.Tensor:
    """The call, whose x and weight are e4m3, its norm already applied. block_n: of the result, halved where gated."""
    num_tokens, in_size = call.x.shape
    out = call.residual
    if out is None:
        out = torch.empty(num_tokens, call.out_size, dtype=scales.dtype, device=call.x.device)
    if not num_tokens:
        return out
    block_n = block_n // 2 if call.gated else block_n
    grid = (triton.cdiv(num_tokens, block_m) * triton.cdiv(call.out_size, block_n),)
    tiles_kernel[grid](
        call.x,
        call.weight,
        scales.x,
        scales.weight,
        call.x if call.bias is None else call.bias,
        out,
        num_tokens,
        in_size,
        call.out_size,
        call.weight.stride(0),
        out.stride(0),
        BY_BLOCK=scales.weight.dim() == 2,
        SCALE_ROWS=call.weight.shape[0] // scales.weight.shape[0],
        HAS_BIAS=call.bias is not None,
        GATED=call.gated,
        HAS_RESIDUAL=call.residual is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK,
        GROUPED=_GROUPED,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(call.x.device),
    )
    return out
