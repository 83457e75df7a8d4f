"""A packed linear map of a row or a few on Hopper: as `stream`, but a tile is 16 rows, and warps share its columns.

Where `stream` cuts a tile of 64 rows among programs, whose sums then meet in memory, the four warps of a program here
have four column tiles of 16 rows at a time, and their sums meet in the program. Each has as many weights as there; but
every program reads all of x, so that it pays for few rows only.

Of queries, keys and values (HEADS) a program has 16 rows of both halves of a head, rotates what it has, and writes
queries to the result, keys and values to the cache, as `linear.triton.heads` does.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from oneloop_kernels.ops.linear.triton.stream import PRODUCER_REGISTERS, _activate, _following
from oneloop_kernels.ops.packed_linear.triton.registers import (
    SLICE,
    TILE_COLUMNS,
    raw_numbers,
    scaled_weights,
    tile_scale,
)

SLICE_ROWS = gl.constexpr(16)
SLICE_TILES = gl.constexpr(4)
"""Column tiles, one per warp."""


@gluon.constexpr_function
def _sums_layout():
    """Of [column tile, rows of the slice, rows of x]: a warp has a column tile's."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])


@gluon.jit(do_not_specialize=["num_tokens", "in_size", "num_slots"])
def slices_kernel(
    x_desc, words_desc, high_desc, params_desc, bias_ptr, out_ptr, angles_ptr, cache_ptr, slots_ptr,
    num_tokens, in_size, out_size, up_tile, out_stride, num_slots, block_stride, position_stride, head_stride,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """As `stream.stream_kernel`, of no more rows of x than BLOCK_M ≤ 16 and columns in whole tiles.

    x_desc: seen as [column tiles, num_tokens, 128], boxes [4, BLOCK_M, 128]. words_desc, high_desc, params_desc: as
    [row tiles, column tiles · a, 4, …], boxes [1, 4 · a, 1, …], where a is 2 (of scales of whole tiles 1). Grid: any
    size up to the number of slices.

    HEADS: of queries, or 0; then KV_HEADS of keys follow, and as many of values. out: [num_tokens, all heads,
    2 · HALF_DIM], of which the queries are written; out_size: half its columns. angles: a row per token, HALF_DIM
    cosines before as many sines, float32. cache, slots, num_slots, strides, BLOCK_SIZE: as in rope.
    """
    halves: gl.constexpr = 2 if GATED or HEADS else 1
    num_blocks = gl.cdiv(in_size, TILE_COLUMNS * SLICE_TILES)
    num_slices = gl.cdiv(out_size, SLICE_ROWS)
    apart = SLICE_TILES * up_tile  # slices of both halves of a pair are so many from each other
    if HEADS:
        apart = HALF_DIM // SLICE_ROWS
    base, extra = num_slices // gl.num_programs(0), num_slices % gl.num_programs(0)
    begin = gl.program_id(0) * base + gl.minimum(gl.program_id(0), extra)
    end = begin + base + (gl.program_id(0) < extra).to(gl.int32)

    words = gl.allocate_shared_memory(gl.int32, [STAGES * halves, 1, 8, 1, 128], words_desc.layout)
    high = words
    if BITS > 4:
        high = gl.allocate_shared_memory(high_desc.dtype, [STAGES * halves, 1, 8, 1, 128], high_desc.layout)
    params_box: gl.constexpr = params_desc.block_type.shape
    params = gl.allocate_shared_memory(
        gl.int32, [STAGES * halves, 1, params_box[1], 1, params_box[3]], params_desc.layout
    )
    rows = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES, SLICE_TILES, BLOCK_M, TILE_COLUMNS], x_desc.layout
    )
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rows_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(rows_arrived.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    words, high, params, rows, arrived, rows_arrived, free, bias_ptr, out_ptr, angles_ptr,
                    cache_ptr, slots_ptr, num_tokens, num_blocks, out_size, out_stride, num_slots,
                    block_stride, position_stride, head_stride, begin, end,
                    HAS_BIAS, GATED, HAS_RESIDUAL, BITS, SHIFT, GROUPS, ON_SUMS,
                    HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE, BLOCK_M, STAGES, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, words_desc, high_desc, params_desc, words, high, params, rows,
                    arrived, rows_arrived, free, num_blocks, apart, begin, end,
                    halves, BITS, HEADS, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, words_desc, high_desc, params_desc, words, high, params, rows, arrived, rows_arrived,
    free, num_blocks, apart, begin, end,
    HALVES: gl.constexpr, BITS: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """As `stream._copy`. The attention reads at once what was complete before HEADS: it is let in after the wait."""
    count = (end - begin) * num_blocks
    ahead = gl.minimum(count, STAGES)
    index, block = begin, begin * 0
    for stage in range(ahead):
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, arrived, stage,
            index, block, apart, HALVES, BITS, HEADS,
        )  # fmt: skip
        index, block = _following(index, block, num_blocks, 1)
    if USE_PDL:
        if not HEADS:
            tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel's copies start while this one runs
        tl.extra.cuda.gdc_wait()
        if HEADS:
            tl.extra.cuda.gdc_launch_dependents()
    index, block = begin, begin * 0
    for stage in range(ahead):
        _copy_rows(x_desc, rows, rows_arrived, stage, block)
        index, block = _following(index, block, num_blocks, 1)
    for step in range(STAGES, count):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, arrived, stage,
            index, block, apart, HALVES, BITS, HEADS,
        )  # fmt: skip
        _copy_rows(x_desc, rows, rows_arrived, stage, block)
        index, block = _following(index, block, num_blocks, 1)


@gluon.jit
def _copy_weights(
    words_desc, high_desc, params_desc, words, high, params, arrived, stage, index, block, apart,
    HALVES: gl.constexpr, BITS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights."""
    num_bytes: gl.constexpr = (
        words_desc.block_type.nbytes
        + params_desc.block_type.nbytes
        + (high_desc.block_type.nbytes if BITS > 4 else 0)
    )
    barrier = arrived.index(stage)
    mbarrier.expect(barrier, HALVES * num_bytes)
    column_tile = block * SLICE_TILES
    first = index
    if HEADS:
        first += index // apart * apart  # the second halves of the heads before
    for half in gl.static_range(HALVES):
        row, part = (first + half * apart) // SLICE_TILES, (first + half * apart) % SLICE_TILES
        place = stage * HALVES + half
        tma.async_copy_global_to_shared(
            words_desc, [row, 2 * column_tile, part, 0], barrier, words.index(place)
        )
        if BITS > 4:
            tma.async_copy_global_to_shared(
                high_desc, [row, 2 * column_tile, part, 0], barrier, high.index(place)
            )
        tma.async_copy_global_to_shared(
            params_desc, [row, params.shape[2] * block, part, 0], barrier, params.index(place)
        )


@gluon.jit
def _copy_rows(x_desc, rows, rows_arrived, stage, block):
    """Ask for a unit's rows of x."""
    barrier = rows_arrived.index(stage)
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [block * SLICE_TILES, 0, 0], barrier, rows.index(stage))


@gluon.jit
def _multiply(
    words, high, params, rows, arrived, rows_arrived, free, bias_ptr, out_ptr, angles_ptr, cache_ptr, slots_ptr,
    num_tokens, num_blocks, out_size, out_stride, num_slots, block_stride, position_stride, head_stride,
    begin, end,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply and finish."""
    layout: gl.constexpr = gl.SliceLayout(0, _sums_layout())
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # the kernel before may read what is written here, or write what is added
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    for index in range(begin, end):
        columns = index * SLICE_ROWS + gl.arange(0, SLICE_ROWS, gl.SliceLayout(1, layout))
        # Long before they are needed: what is added, angles, slots.
        if HEADS:
            head = index // (HALF_DIM // SLICE_ROWS)
            columns -= head * HALF_DIM
            angles = angles_ptr + tokens[None, :].to(gl.int64) * (2 * HALF_DIM) + columns[:, None]
            is_turned = (tokens < num_tokens)[None, :] & (head < HEADS + KV_HEADS)
            cosine = gl.load(angles, mask=is_turned, other=1.0)
            sine = gl.load(angles + HALF_DIM, mask=is_turned, other=0.0)
            slot = gl.load(slots_ptr + tokens, mask=(tokens < num_tokens) & (tokens < num_slots), other=-1)
        else:
            places = out_ptr + tokens[None, :].to(gl.int64) * out_stride + columns[:, None]
            mask = (columns < out_size)[:, None] & (tokens < num_tokens)[None, :]
            if HAS_RESIDUAL:
                residual = gl.load(places, mask=mask, other=0.0)
        gate, up = _products(
            words, high, params, rows, arrived, rows_arrived, free, (index - begin) * num_blocks, num_blocks,
            GATED or HEADS > 0, BITS, SHIFT, GROUPS, ON_SUMS, BLOCK_M, STAGES,
        )  # fmt: skip
        if HEADS:
            _rotate_and_store(
                gate, up, cosine, sine, slot, bias_ptr, out_ptr, cache_ptr, head, columns, tokens,
                num_tokens, out_stride, block_stride, position_stride, head_stride,
                HAS_BIAS, HEADS, HALF_DIM, BLOCK_SIZE,
            )  # fmt: skip
        else:
            gate = _activate(
                gate, up, bias_ptr, index * SLICE_ROWS, out_size, HAS_BIAS, GATED, SLICE_ROWS, layout
            )
            if HAS_RESIDUAL:
                gate += residual.to(gl.float32)
            gl.store(places, gate.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _rotate_and_store(
    first, second, cosine, sine, slot, bias_ptr, out_ptr, cache_ptr, head, columns, tokens,
    num_tokens, out_stride, block_stride, position_stride, head_stride,
    HAS_BIAS: gl.constexpr, HEADS: gl.constexpr, HALF_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """first, second: [16, BLOCK_M], `columns` of both halves of a head. Cosines are 1 and sines 0 of values."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:
        bias = bias_ptr + head * (2 * HALF_DIM) + columns
        first += gl.load(bias).to(gl.float32)[:, None]
        second += gl.load(bias + HALF_DIM).to(gl.float32)[:, None]
    # As if the product had been a kernel of its own: what is rotated is rounded.
    a = first.to(dtype).to(gl.float32)
    b = second.to(dtype).to(gl.float32)
    first = (a * cosine - b * sine).to(dtype)
    second = (b * cosine + a * sine).to(dtype)
    if head < HEADS:
        places = (
            out_ptr + tokens[None, :].to(gl.int64) * out_stride + (head * (2 * HALF_DIM) + columns)[:, None]
        )
        known = gl.broadcast((tokens < num_tokens)[None, :], first)[0]
        gl.store(places, first, mask=known)
        gl.store(places + HALF_DIM, second, mask=known)
    else:
        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
        target += (head - HEADS).to(gl.int64) * head_stride
        places = cache_ptr + target[None, :] + columns[:, None]
        kept = gl.broadcast((slot >= 0)[None, :], first)[0]
        gl.store(places, first, mask=kept)
        gl.store(places + HALF_DIM, second, mask=kept)


@gluon.jit
def _products(
    words, high, params, rows, arrived, rows_arrived, free, begin, count,
    PAIRED: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of a slice or a pair, from the program's unit `begin` on: gate, up [16, BLOCK_M]."""
    layout: gl.constexpr = _sums_layout()
    halves: gl.constexpr = 2 if PAIRED else 1
    gate = gl.zeros([SLICE_TILES, SLICE_ROWS, BLOCK_M], gl.float32, layout)
    up = gate
    for step in range(begin, begin + count):
        stage = step % STAGES
        place = stage * halves
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        weights = _weights(words, high, params, place, BITS, SHIFT, GROUPS, ON_SUMS, rows.dtype, layout)
        mbarrier.wait(rows_arrived.index(stage), (step // STAGES) & 1)
        x = rows.index(stage).permute((0, 2, 1)).load(gl.DotOperandLayout(1, layout, 2))
        sums = gate
        if ON_SUMS and SHIFT == "offset":
            ones = gl.full(
                [SLICE_TILES, SLICE_ROWS, TILE_COLUMNS], 1.0, x.dtype, gl.DotOperandLayout(0, layout, 2)
            )
            sums = mma_v2(ones, x, gl.zeros([SLICE_TILES, SLICE_ROWS, BLOCK_M], gl.float32, layout))
        gate = _add(gate, weights, x, sums, params, place, SHIFT, ON_SUMS, layout)
        if PAIRED:
            weights = _weights(
                words, high, params, place + 1, BITS, SHIFT, GROUPS, ON_SUMS, rows.dtype, layout
            )
            up = _add(up, weights, x, sums, params, place + 1, SHIFT, ON_SUMS, layout)
        mbarrier.arrive(free.index(stage))
    gate = gl.sum(gate, 0)
    if PAIRED:
        up = gl.sum(up, 0)
    else:
        up = gate
    return gate, up


@gluon.jit
def _weights(
    words, high, params, place,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    kind: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """[4, 16, 128], scaled or not."""
    if ON_SUMS:
        weights = raw_numbers(words, params, place, 0, SHIFT, SLICE, kind, layout)
    else:
        weights = scaled_weights(words, high, params, place, 0, BITS, SHIFT, GROUPS, SLICE, kind, layout)
    return weights


@gluon.jit
def _add(
    total, weights, x, sums, params, place,
    SHIFT: gl.constexpr, ON_SUMS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """total and the product; ON_SUMS as `stream._add_scaled`."""
    if ON_SUMS:
        found = mma_v2(weights, x, gl.zeros(total.shape, gl.float32, layout))
        scale, shift = tile_scale(params, place, 0, SHIFT, SLICE, x.dtype, layout)
        total += found * scale[:, :, None]
        if SHIFT == "offset":
            total += sums * shift[:, :, None]
    else:
        total = mma_v2(weights, x, total)
    return total
