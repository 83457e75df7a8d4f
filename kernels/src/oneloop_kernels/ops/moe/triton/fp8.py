"""The experts' products of 8-bit floats: as `experts`, with scales.

What is multiplied with weights is quantised before, or of few tokens by each program for itself, to the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.float8.triton import as_float8
from oneloop_kernels.ops.moe.triton.experts import combine_if_last, prefetch, tile_of
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile

GROUP = tl.constexpr(128)
"""Inputs that share a scale, where weights are scaled by blocks."""
LARGEST = tl.constexpr(448.0)
"""Of e4m3."""
SMALLEST_SCALE = tl.constexpr(1e-12)
CHUNK = tl.constexpr(256)
"""Columns of x that are looked through at a time."""


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_rows"])
def fp8_experts_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, out_ptr, ids_ptr, factors_ptr, bins_ptr, tiles_ptr,
    sum_ptr, shared_ptr, logits_ptr, slots_ptr, counters_ptr,
    out_size, num_rows, num_tokens, num_slots, sum_stride, shared_stride, shared_in_stride,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, BY_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    QUANTIZES: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    FEW: tl.constexpr, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, TOKENS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, COMBINED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """See experts_kernel; of what differs:

    weight: e4m3; scales: float32, one for SCALE_ROWS rows (of all experts), or with BY_BLOCK for each GROUP of their
    columns. x: [num_rows, IN_SIZE] contiguous; with QUANTIZES of 16 bits or more, else e4m3 with x_scales: float32
    [num_rows], or with BY_BLOCK [⌈IN_SIZE / GROUP⌉, num_rows]. BLOCK_K: GROUP, where BY_BLOCK.
    """
    tl.static_assert(BLOCK_K == GROUP or not BY_BLOCK)
    AHEAD: tl.constexpr = QUANTIZES and not BY_BLOCK and IN_SIZE % 16 == 0
    num_blocks = tl.cdiv(out_size, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    if USE_PDL and PREFETCH == 0:
        tl.extra.cuda.gdc_wait()
    is_tile, expert, tokens, rows, live, pairs_ptr = tile_of(
        tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens, TOP_K, TOP_K_PAD, FEW, BY_PAIR, ONE_TOKEN, BLOCK_M
    )
    weight_rows = _rows_of(expert, block, out_size, GATED, BLOCK_N)
    if USE_PDL and PREFETCH > 0:
        if is_tile:
            prefetch(weight_ptr + weight_rows * IN_SIZE, PREFETCH, (2 if GATED else 1) * BLOCK_N)
        tl.extra.cuda.gdc_wait()
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: who comes next may rely on the routing
    if is_tile:
        if USE_PDL and AHEAD:  # all of a tile's weights, while x is looked through
            prefetch(weight_ptr + weight_rows * IN_SIZE, IN_SIZE, (2 if GATED else 1) * BLOCK_N)
        if FEW:
            pairs = rows
        else:
            pairs = tl.load(pairs_ptr + tl.arange(0, BLOCK_M), mask=live, other=0, cache_modifier=".cg")
            tokens = pairs // TOP_K
        sources = tokens if GATED else rows
        sums = _products(
            x_ptr, x_scales_ptr, sources, num_rows, live, weight_ptr, scales_ptr, weight_rows,
            expert.to(tl.int64) * ((2 if GATED else 1) * out_size) + block * BLOCK_N, out_size,
            IN_SIZE, GATED, BY_BLOCK, SCALE_ROWS, QUANTIZES, TOKENS_WIDE, BLOCK_M, (2 if GATED else 1) * BLOCK_N,
            BLOCK_K, STAGES,
        )  # fmt: skip
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (columns < out_size)[None, :]
        if GATED:
            sums = sums.reshape(BLOCK_M, BLOCK_N // 8, 2, 8).permute(0, 1, 3, 2).reshape(BLOCK_M, BLOCK_N, 2)
            gate, up = tl.split(sums)
            out = silu_mul_tile(gate, up)
            targets = rows
        else:
            factors = tl.load(factors_ptr + pairs, mask=live, other=0.0, cache_modifier=".cg")
            out = sums * factors[:, None]
            targets = pairs
        places = out_ptr + targets.to(tl.int64)[:, None] * out_size + columns[None, :]
        tl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
    if COMBINED > 0:
        combine_if_last(
            tl.num_programs(0) // num_blocks, block, out_ptr, shared_ptr, logits_ptr, slots_ptr, sum_ptr, counters_ptr,
            num_tokens, num_slots, out_size, sum_stride, shared_stride, shared_in_stride,
            NUM_EXPERTS, EXPERTS_PAD, TOP_K, HAS_GATE, HAS_SHARED, HAS_SLOTS, BLOCK_N, COMBINED,
        )  # fmt: skip


@triton.jit
def _rows_of(expert, block, out_size, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block's rows of weights, counted over all experts; gate and up in turns of eight, as in `experts`."""
    halves: tl.constexpr = 2 if GATED else 1
    index = tl.arange(0, halves * BLOCK_N)
    if GATED:
        column = block * BLOCK_N + index // 16 * 8 + index % 8
        row = tl.minimum(column, out_size - 1) + index // 8 % 2 * out_size
    else:
        row = tl.minimum(block * BLOCK_N + index, out_size - 1)
    return expert.to(tl.int64) * (halves * out_size) + row


@triton.jit
def _products(
    x_ptr, x_scales_ptr, sources, num_rows, live, weight_ptr, scales_ptr, weight_rows, first_row, out_size,
    IN_SIZE: tl.constexpr, GATED: tl.constexpr, BY_BLOCK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    QUANTIZES: tl.constexpr, TOKENS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, COLUMNS] in float32, scaled. sources: [BLOCK_M] rows of x. first_row: the lowest of weight_rows."""
    SHARED: tl.constexpr = (
        SCALE_ROWS % (COLUMNS // 2 if GATED else COLUMNS) == 0
    )  # so all rows of a half have a scale
    EVEN: tl.constexpr = IN_SIZE % BLOCK_K == 0
    GROUPS: tl.constexpr = (IN_SIZE + GROUP - 1) // GROUP
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + sources.to(tl.int64)[:, None] * IN_SIZE
    weight_places = weight_ptr + weight_rows[:, None] * IN_SIZE
    scale_places = scales_ptr + weight_rows // SCALE_ROWS * (GROUPS if BY_BLOCK else 1)
    first_places = scales_ptr + first_row // SCALE_ROWS * GROUPS
    up_place = out_size // SCALE_ROWS * GROUPS
    is_up = tl.arange(0, COLUMNS) // 8 % 2 == 1
    x_scales = tl.full([BLOCK_M], 1.0, tl.float32)
    if not BY_BLOCK:
        if QUANTIZES:
            x_scales = _scales(_largest_of_rows(x_rows, live, IN_SIZE, BLOCK_M))
        else:
            x_scales = tl.load(x_scales_ptr + sources, mask=live, other=0.0)
    if TOKENS_WIDE:
        sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    else:
        sums = tl.zeros([COLUMNS, BLOCK_M], tl.float32)
    for start in tl.range(0, IN_SIZE, BLOCK_K, num_stages=STAGES):
        columns = start + k
        within = columns < IN_SIZE
        if EVEN:
            weights = tl.load(weight_places + columns[None, :])
        else:
            weights = tl.load(weight_places + columns[None, :], mask=within[None, :], other=0.0)
        x = tl.load(x_rows + columns[None, :], mask=live[:, None] & within[None, :], other=0.0)
        if BY_BLOCK:
            group = start // GROUP
            if SHARED and GATED:
                up_scale = tl.load(first_places + up_place + group)
                scales = tl.where(is_up, up_scale, tl.load(first_places + group))
            elif SHARED:
                scales = tl.full([COLUMNS], 1.0, tl.float32) * tl.load(first_places + group)
            else:
                scales = tl.load(scale_places + group)
            if not QUANTIZES:
                x_scales = tl.load(x_scales_ptr + group * num_rows + sources, mask=live, other=0.0)
        if QUANTIZES:
            wide = x.to(tl.float32)
            if BY_BLOCK:
                x_scales = _scales(tl.max(tl.abs(wide), 1))
            x = as_float8(wide / x_scales[:, None])
        if TOKENS_WIDE:
            if BY_BLOCK:
                sums += tl.dot(x, tl.trans(weights)) * (x_scales[:, None] * scales[None, :])
            else:
                sums = tl.dot(x, tl.trans(weights), sums)
        else:
            if BY_BLOCK:
                sums += tl.dot(weights, tl.trans(x)) * (scales[:, None] * x_scales[None, :])
            else:
                sums = tl.dot(weights, tl.trans(x), sums)
    if not TOKENS_WIDE:
        sums = tl.trans(sums)
    if not BY_BLOCK:
        sums *= x_scales[:, None] * tl.load(scale_places)[None, :]
    return sums


@triton.jit
def _scales(largest):
    """Of what is as large as this at most."""
    return tl.maximum(largest / LARGEST, SMALLEST_SCALE)


@triton.jit
def _largest_of_rows(x_rows, live, IN_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The largest magnitude of each row. x_rows: [BLOCK_M, 1] pointers. Unrolled, so that loads do not wait in turn."""
    k = tl.arange(0, CHUNK)
    largest = tl.zeros([BLOCK_M, CHUNK], tl.float32)
    for start in tl.static_range(0, IN_SIZE, CHUNK):
        mask = live[:, None] & (start + k < IN_SIZE)[None, :]
        x = tl.load(x_rows + start + k[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    return tl.max(largest, 1)
