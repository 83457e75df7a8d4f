"""The products of experts whose weights are of a few bits: as `experts`, but tiles of weights are unpacked on the way.

A program has 64 results of a tile of one expert's pairs, so that each of its tiles of weights is unpacked once for all
of these. Nothing is written out, however many tokens there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.moe.triton.experts import combine_if_last, tile_of
from oneloop_kernels.ops.packed_linear.triton.unpack import TILE_COLUMNS, TILE_ROWS, unpacked_tile
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def packed_experts_kernel(
    x_ptr, words_ptr, high_ptr, params_ptr, order_ptr, out_ptr, ids_ptr, factors_ptr, bins_ptr, tiles_ptr,
    sum_ptr, shared_ptr, logits_ptr, slots_ptr, counters_ptr,
    out_size, x_stride, num_tokens, num_slots, sum_stride, shared_stride, shared_in_stride,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    FEW: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr, HAS_ORDER: tl.constexpr, COMBINED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_kernel` with blocks of 64 results. words, high, params, order: see moe.packed_stack.PackedStack.

    Grid: [tiles · ceil(out_size / 64)].
    """
    num_blocks = tl.cdiv(out_size, TILE_ROWS)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    is_tile, expert, tokens, rows, live, pairs_ptr = tile_of(
        tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens, TOP_K, TOP_K_PAD, FEW, BY_PAIR, ONE_TOKEN, BLOCK_M
    )
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: who comes next may rely on the routing
    if is_tile:
        if FEW:
            pairs = rows
        else:
            pairs = tl.load(pairs_ptr + tl.arange(0, BLOCK_M), mask=live, other=0, cache_modifier=".cg")
            tokens = pairs // TOP_K
        sources = tokens if GATED else rows
        sums = _packed_products(
            x_ptr + sources.to(tl.int64) * x_stride, live, words_ptr, high_ptr, params_ptr,
            order_ptr + expert.to(tl.int64) * IN_SIZE, expert, block, num_blocks,
            IN_SIZE, GATED, BITS, SHIFT, GROUPS, HAS_ORDER, BLOCK_M, STAGES,
        )  # fmt: skip
        columns = block * TILE_ROWS + tl.arange(0, TILE_ROWS)
        if GATED:
            targets = rows
        else:
            factors = tl.load(factors_ptr + pairs, mask=live, other=0.0, cache_modifier=".cg")
            sums *= factors[None, :]
            targets = pairs
        places = out_ptr + targets.to(tl.int64)[:, None] * out_size + columns[None, :]
        mask = live[:, None] & (columns < out_size)[None, :]
        tl.store(places, tl.trans(sums).to(out_ptr.dtype.element_ty), mask=mask)
    if COMBINED > 0:
        combine_if_last(
            tl.num_programs(0) // num_blocks, block, out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, counters_ptr,
            num_tokens, num_slots, out_size, sum_stride, shared_stride, shared_in_stride,
            NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS, TILE_ROWS, COMBINED,
        )  # fmt: skip


@triton.jit
def _packed_products(
    x_rows, live, words_ptr, high_ptr, params_ptr, order_ptr, expert, block, num_blocks,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, BITS: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    HAS_ORDER: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[64, BLOCK_M] in float32, with the activation if GATED. x_rows: [BLOCK_M] pointers. order: the expert's."""
    halves: tl.constexpr = 2 if GATED else 1
    COLUMN_TILES: tl.constexpr = (IN_SIZE + TILE_COLUMNS - 1) // TILE_COLUMNS
    first = (expert.to(tl.int64) * halves * num_blocks + block) * COLUMN_TILES
    k = tl.arange(0, TILE_COLUMNS)
    gate = tl.zeros([TILE_ROWS, BLOCK_M], tl.float32)
    up = tl.zeros([TILE_ROWS, BLOCK_M], tl.float32)
    for column_tile in tl.range(0, COLUMN_TILES, num_stages=STAGES):
        columns = column_tile * TILE_COLUMNS + k
        within = columns < IN_SIZE
        places = columns
        if HAS_ORDER:
            places = tl.load(order_ptr + columns, mask=within, other=0)
        x = tl.load(x_rows[:, None] + places[None, :], mask=live[:, None] & within[None, :], other=0.0)
        x = tl.trans(x)
        tile = first + column_tile
        weights = unpacked_tile(words_ptr, high_ptr, params_ptr, tile, BITS, SHIFT, GROUPS)
        gate = tl.dot(weights, x, gate, input_precision="ieee")
        if GATED:
            tile += tl.cast(num_blocks, tl.int64) * COLUMN_TILES
            weights = unpacked_tile(words_ptr, high_ptr, params_ptr, tile, BITS, SHIFT, GROUPS)
            up = tl.dot(weights, x, up, input_precision="ieee")
    return silu_mul_tile(gate, up) if GATED else gate
