"""Queries, keys and values on Hopper: the product of dense.py, and in its place what else the attention needs first.

A program has BLOCK_M rows of x and WIDTH columns of both halves of a head: pairs that are rotated together. It norms
(with a whole head only) and rotates what it has, and writes queries to the result, keys and values to the cache.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def _sums_layout(columns, num_warps):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def _out_layout(columns, num_warps):
    """Eight results of a row, 16 bytes, to a thread."""
    across = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit(do_not_specialize=["num_tokens", "num_slots"])
def heads_kernel(
    x_desc, weight_desc, bias_ptr, out_ptr, angles_ptr, norm_ptr, cache_ptr, slots_ptr,
    num_tokens, in_size, num_slots, block_stride, position_stride, head_stride, eps,
    HAS_BIAS: gl.constexpr, NORM: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    HALF_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x_desc, weight_desc: tensor maps with boxes [BLOCK_M, BLOCK_K] and [WIDTH, BLOCK_K]; what lies outside is zero.

    out: [num_tokens, NUM_HEADS + 2 · NUM_KV_HEADS, 2 · HALF_DIM], of which the queries are written. angles: a row per
    token, HALF_DIM cosines before as many sines, float32. norm: [2, 2 · HALF_DIM], with NORM, which wants WIDTH =
    HALF_DIM. cache, slots, num_slots, strides: as in rope. Grid: tiles of rows · heads · (HALF_DIM / WIDTH).
    """
    num_blocks = gl.cdiv(in_size, BLOCK_K)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    first_token = gl.program_id(0) % token_tiles * BLOCK_M
    part = gl.program_id(0) // token_tiles
    head = part // (HALF_DIM // WIDTH)
    column = part % (HALF_DIM // WIDTH) * WIDTH

    kind: gl.constexpr = x_desc.dtype
    rows = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    weights = gl.allocate_shared_memory(kind, [STAGES, 2 * WIDTH, BLOCK_K], weight_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    rows, weights, arrived, free, bias_ptr, out_ptr, angles_ptr, norm_ptr, cache_ptr, slots_ptr,
                    first_token, head, column, num_blocks, num_tokens, num_slots,
                    block_stride, position_stride, head_stride, eps,
                    HAS_BIAS, NORM, NUM_HEADS, NUM_KV_HEADS, HALF_DIM, BLOCK_SIZE, WIDTH, BLOCK_M, STAGES, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, weight_desc, rows, weights, arrived, free, first_token, head, column, num_blocks,
                    HALF_DIM, WIDTH, BLOCK_M, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, weight_desc, rows, weights, arrived, free, first_token, head, column, num_blocks,
    HALF_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come.

    The attention reads at once what was complete before this kernel: it is let in after the wait, not before.
    """
    row = head * (2 * HALF_DIM) + column
    ahead = gl.minimum(num_blocks, STAGES)
    for unit in range(ahead):
        _copy_weights(
            weight_desc, weights, arrived.index(unit), unit, row, unit * BLOCK_K, HALF_DIM, WIDTH, BLOCK_M, BLOCK_K
        )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for unit in range(ahead):
        tma.async_copy_global_to_shared(
            x_desc, [first_token, unit * BLOCK_K], arrived.index(unit), rows.index(unit)
        )
    for unit in range(STAGES, num_blocks):
        stage = unit % STAGES
        mbarrier.wait(free.index(stage), (unit // STAGES - 1) & 1)
        _copy_weights(
            weight_desc, weights, arrived.index(stage), stage, row, unit * BLOCK_K, HALF_DIM, WIDTH, BLOCK_M, BLOCK_K
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            x_desc, [first_token, unit * BLOCK_K], arrived.index(stage), rows.index(stage)
        )


@gluon.jit
def _copy_weights(
    desc, weights, barrier, stage, row, column,
    HALF_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    mbarrier.expect(barrier, 2 * (2 * WIDTH + BLOCK_M) * BLOCK_K)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(
            desc, [row + half * HALF_DIM, column], barrier, weights.index(stage).slice(half * WIDTH, WIDTH)
        )


@gluon.jit
def _multiply(
    rows, weights, arrived, free, bias_ptr, out_ptr, angles_ptr, norm_ptr, cache_ptr, slots_ptr,
    first_token, head, first_column, num_blocks, num_tokens, num_slots,
    block_stride, position_stride, head_stride, eps,
    HAS_BIAS: gl.constexpr, NORM: gl.constexpr, NUM_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    HALF_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply, norm, rotate and write."""
    layout: gl.constexpr = _out_layout(WIDTH, gl.num_warps())
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    columns = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    tokens = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    known = tokens < num_tokens
    is_turned = head < NUM_HEADS + NUM_KV_HEADS
    # Long before they are needed: angles, slots.
    angles = angles_ptr + tokens[:, None].to(gl.int64) * (2 * HALF_DIM) + columns[None, :]
    turned = (known & is_turned)[:, None] & (columns < HALF_DIM)[None, :]
    cosine = gl.load(angles, mask=turned, other=1.0)
    sine = gl.load(angles + HALF_DIM, mask=turned, other=0.0)
    slot = gl.load(slots_ptr + tokens, mask=known & (tokens < num_slots), other=-1)
    sums = _products(rows, weights, arrived, free, num_blocks, WIDTH, BLOCK_M, STAGES)
    first, second = sums.reshape([BLOCK_M, 2, WIDTH]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first, layout)
    second = gl.convert_layout(second, layout)
    if HAS_BIAS:
        bias = bias_ptr + head * (2 * HALF_DIM) + columns
        first += gl.load(bias).to(gl.float32)[None, :]
        second += gl.load(bias + HALF_DIM).to(gl.float32)[None, :]
    # As if the product had been a kernel of its own: what is normed and rotated is rounded.
    first = first.to(dtype).to(gl.float32)
    second = second.to(dtype).to(gl.float32)
    if is_turned:
        a = first
        b = second
        if NORM:
            gl.static_assert(WIDTH == HALF_DIM)
            weight = norm_ptr + gl.where(head < NUM_HEADS, 0, 2 * HALF_DIM) + columns
            squares = gl.sum(a * a, 1) + gl.sum(b * b, 1)
            inverse = gl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
            a = _scaled(a, inverse, weight, dtype)
            b = _scaled(b, inverse, weight + HALF_DIM, dtype)
        first = a * cosine - b * sine
        second = b * cosine + a * sine
    if head < NUM_HEADS:
        row = tokens.to(gl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) + head
        places = out_ptr + row[:, None] * (2 * HALF_DIM) + columns[None, :]
        mask = known[:, None] & (columns < HALF_DIM)[None, :]
        gl.store(places, first.to(dtype), mask=mask)
        gl.store(places + HALF_DIM, second.to(dtype), mask=mask)
    else:
        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
        target += (head - NUM_HEADS).to(gl.int64) * head_stride
        places = cache_ptr + target[:, None] + columns[None, :]
        mask = (slot >= 0)[:, None] & (columns < HALF_DIM)[None, :]
        gl.store(places, first.to(dtype), mask=mask)
        gl.store(places + HALF_DIM, second.to(dtype), mask=mask)


@gluon.jit
def _scaled(half, inverse, weight, dtype: gl.constexpr):
    """Half of the heads normed, rounded as ops.rms_norm says."""
    quotient = (half * inverse).to(dtype).to(gl.float32)
    return (quotient * gl.load(weight).to(gl.float32)[None, :]).to(dtype).to(gl.float32)


@gluon.jit
def _products(
    rows, weights, arrived, free, count, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """[BLOCK_M, 2 · WIDTH]: the columns of the first half, then those of the second."""
    layout: gl.constexpr = _sums_layout(2 * WIDTH, gl.num_warps())
    sums = gl.zeros([BLOCK_M, 2 * WIDTH], gl.float32, layout)
    for unit in range(count):
        stage = unit % STAGES
        mbarrier.wait(arrived.index(stage), (unit // STAGES) & 1)
        sums = warpgroup_mma(rows.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        # That of the block before is through; this one's is under way.
        mbarrier.arrive(free.index((unit + STAGES - 1) % STAGES), pred=unit > 0)
    return warpgroup_mma_wait(0, deps=[sums])
