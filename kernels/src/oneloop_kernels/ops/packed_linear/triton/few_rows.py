"""A packed linear map of few rows on any card: each tile of weights is unpacked once and multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.packed_linear.triton.unpack import TILE_COLUMNS, TILE_ROWS, unpacked_tile
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile


@triton.jit(do_not_specialize=["num_tokens"])
def few_rows_kernel(
    x_ptr, words_ptr, high_ptr, params_ptr, bias_ptr, out_ptr,
    num_tokens, in_size, out_size, column_tiles, up_tile, x_stride, out_stride,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BITS: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = W · xᵀ + bias, or that product itself.

    Grid: [ceil(out_size / 64), ceil(num_tokens / BLOCK_M)]. BLOCK_M ≥ 16. out_size: columns of the result.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_tile = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = tokens < num_tokens
    x_row = x_ptr + tokens[None, :].to(tl.int64) * x_stride
    gate = tl.zeros([TILE_ROWS, BLOCK_M], tl.float32)
    up = tl.zeros([TILE_ROWS, BLOCK_M], tl.float32)
    for column_tile in range(column_tiles):
        k = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        x = tl.load(x_row + k[:, None], mask=live[None, :] & (k < in_size)[:, None], other=0.0)
        tile = row_tile.to(tl.int64) * column_tiles + column_tile
        weights = unpacked_tile(words_ptr, high_ptr, params_ptr, tile, BITS, SHIFT, GROUPS)
        gate = tl.dot(weights, x, gate, input_precision="ieee")
        if GATED:
            tile += tl.cast(up_tile, tl.int64) * column_tiles
            weights = unpacked_tile(words_ptr, high_ptr, params_ptr, tile, BITS, SHIFT, GROUPS)
            up = tl.dot(weights, x, up, input_precision="ieee")
    columns = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    within = columns < out_size
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=within, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + out_size + columns, mask=within, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = silu_mul_tile(gate, up)
    places = out_ptr + tokens[None, :].to(tl.int64) * out_stride + columns[:, None]
    mask = within[:, None] & live[None, :]
    if HAS_RESIDUAL:
        gate += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, gate, mask=mask)
