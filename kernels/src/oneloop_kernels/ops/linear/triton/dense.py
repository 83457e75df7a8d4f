"""A linear map on Hopper for as many rows as keep the tensor cores busy: one warp copies, four or eight multiply.

A tile is BLOCK_M rows of x times a chunk of results, as wide as leaves all multiprocessors the same number of tiles.
Shapes are powers of two, so a chunk is up to three of them side by side, each with sums of its own. Programs that
follow one another have the same weights and different rows of x, so that weights come from memory once.
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

from oneloop_kernels.ops.linear.triton.rounding import rounded_product

PRODUCER_REGISTERS = gl.constexpr(24)
BY_ROW = gl.constexpr(1)
"""SCALES: what has a scale; 0: nothing."""


@gluon.constexpr_function
def _sums_layout(columns, num_warps, item_bytes):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 32 // item_bytes]
    )


@gluon.constexpr_function
def _out_layout(columns, num_warps):
    """Eight results of a row, 16 bytes, to a thread."""
    across = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit(do_not_specialize=["num_tokens", "in_size"])
def dense_kernel(
    x_desc, first_desc, second_desc, third_desc, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partial_ptr,
    num_tokens, in_size, out_size, out_stride,
    SCALES: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = x · Wᵀ + bias, or that product itself.

    x_desc: tensor map with boxes [BLOCK_M, BLOCK_K]; first_, second_, third_desc: of the weights, with boxes
    [FIRST, BLOCK_K], …; SECOND and THIRD may be 0. What lies outside reads as zero. out_size: columns of the result.
    SCALES: of float32: x_scales [num_tokens], weight_scales [rows of W], applied to the sums; x and W then are e4m3.
    PIECES: so many equal parts of the columns of x have sums of their own, which are added up in ascending order; they
    divide the blocks. partial: float32 [programs, BLOCK_M · halves · CHUNK], uninitialised; only with PIECES > 1.
    Grid: a multiple of the number of tiles of rows.
    """
    halves: gl.constexpr = 2 if GATED else 1
    CHUNK: gl.constexpr = FIRST + SECOND + THIRD
    num_blocks = gl.cdiv(in_size, BLOCK_K)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    num_chunks = gl.cdiv(out_size, CHUNK)
    first_token = gl.program_id(0) % token_tiles * BLOCK_M
    chunk = gl.program_id(0) // token_tiles
    step = gl.num_programs(0) // token_tiles

    kind: gl.constexpr = x_desc.dtype
    rows = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    first = gl.allocate_shared_memory(kind, [STAGES, halves * FIRST, BLOCK_K], first_desc.layout)
    second = first
    if SECOND > 0:
        second = gl.allocate_shared_memory(kind, [STAGES, halves * SECOND, BLOCK_K], second_desc.layout)
    third = first
    if THIRD > 0:
        third = gl.allocate_shared_memory(kind, [STAGES, halves * THIRD, BLOCK_K], third_desc.layout)
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
                    rows, first, second, third, arrived, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                    partial_ptr, first_token, chunk, step, num_chunks, num_blocks, num_tokens, out_size, out_stride,
                    SCALES, HAS_BIAS, GATED, HAS_RESIDUAL, FIRST, SECOND, THIRD, BLOCK_M, PIECES, STAGES, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, first_desc, second_desc, third_desc, rows, first, second, third, arrived, free,
                    first_token, chunk, step, num_chunks, num_blocks, out_size,
                    GATED, FIRST, SECOND, THIRD, BLOCK_M, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, first_desc, second_desc, third_desc, rows, first, second, third, arrived, free,
    first_token, chunk, step, num_chunks, num_blocks, out_size,
    GATED: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come."""
    CHUNK: gl.constexpr = FIRST + SECOND + THIRD
    width = num_blocks * BLOCK_K
    total = gl.cdiv(num_chunks - chunk, step) * num_blocks
    ahead = gl.minimum(total, STAGES)
    row = chunk * CHUNK
    column = row * 0
    for stage in range(ahead):
        _copy_weights(
            first_desc, second_desc, third_desc, first, second, third, arrived.index(stage), stage, row, column,
            out_size, GATED, FIRST, SECOND, THIRD, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        row, column = _following(row, column, step * CHUNK, width, BLOCK_K)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel's copies start while this one runs
        tl.extra.cuda.gdc_wait()
    for stage in range(ahead):
        tma.async_copy_global_to_shared(
            x_desc, [first_token, stage % num_blocks * BLOCK_K], arrived.index(stage), rows.index(stage)
        )
    for unit in range(STAGES, total):
        stage = unit % STAGES
        mbarrier.wait(free.index(stage), (unit // STAGES - 1) & 1)
        _copy_weights(
            first_desc, second_desc, third_desc, first, second, third, arrived.index(stage), stage, row, column,
            out_size, GATED, FIRST, SECOND, THIRD, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        tma.async_copy_global_to_shared(
            x_desc, [first_token, column], arrived.index(stage), rows.index(stage)
        )
        row, column = _following(row, column, step * CHUNK, width, BLOCK_K)


@gluon.jit
def _following(row, column, rows_on, width, BLOCK_K: gl.constexpr):
    """Where the next unit is."""
    column += BLOCK_K
    wrapped = column >= width
    return gl.where(wrapped, row + rows_on, row), gl.where(wrapped, 0, column)


@gluon.jit
def _copy_weights(
    first_desc, second_desc, third_desc, first, second, third, barrier, stage, row, column, out_size,
    GATED: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    halves: gl.constexpr = 2 if GATED else 1
    item_bytes: gl.constexpr = first.dtype.primitive_bitwidth // 8
    mbarrier.expect(barrier, item_bytes * (halves * (FIRST + SECOND + THIRD) + BLOCK_M) * BLOCK_K)
    for half in gl.static_range(halves):
        place = row + half * out_size
        tma.async_copy_global_to_shared(
            first_desc, [place, column], barrier, first.index(stage).slice(half * FIRST, FIRST)
        )
        if SECOND > 0:
            tma.async_copy_global_to_shared(
                second_desc,
                [place + FIRST, column],
                barrier,
                second.index(stage).slice(half * SECOND, SECOND),
            )
        if THIRD > 0:
            tma.async_copy_global_to_shared(
                third_desc,
                [place + FIRST + SECOND, column],
                barrier,
                third.index(stage).slice(half * THIRD, THIRD),
            )


@gluon.jit
def _multiply(
    rows, first, second, third, arrived, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partial_ptr,
    first_token, chunk, step, num_chunks, num_blocks, num_tokens, out_size, out_stride,
    SCALES: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr, PIECES: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and finish."""
    CHUNK: gl.constexpr = FIRST + SECOND + THIRD
    ITEM_BYTES: gl.constexpr = first.dtype.primitive_bitwidth // 8
    halves: gl.constexpr = 2 if GATED else 1
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # the kernel before may read what is written here, or write what is added
    count = num_blocks // PIECES
    kept = partial_ptr + gl.program_id(0).to(gl.int64) * (BLOCK_M * halves * CHUNK)
    # One loop over the pieces of all chunks: the products of a second one would not find room for their sums.
    for turn in range(gl.cdiv(num_chunks - chunk, step) * PIECES):
        a, b, c = _products(
            rows, first, second, third, arrived, free, turn * count, count,
            GATED, FIRST, SECOND, THIRD, BLOCK_M, STAGES,
        )  # fmt: skip
        piece = turn % PIECES
        if PIECES > 1:
            if piece > 0:
                a, b, c = _with_kept(a, b, c, kept, GATED, FIRST, SECOND, THIRD, BLOCK_M)
            if piece + 1 < PIECES:
                _keep(a, b, c, kept, GATED, FIRST, SECOND, THIRD, BLOCK_M)
        if piece + 1 == PIECES:
            column = (chunk + turn // PIECES * step) * CHUNK
            _finish(
                a, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                column, first_token, num_tokens, out_size, out_stride,
                ITEM_BYTES, SCALES, HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, FIRST,
            )  # fmt: skip
            if SECOND > 0:
                _finish(
                    b, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                    column + FIRST, first_token, num_tokens, out_size, out_stride,
                    ITEM_BYTES, SCALES, HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, SECOND,
                )  # fmt: skip
            if THIRD > 0:
                _finish(
                    c, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
                    column + FIRST + SECOND, first_token, num_tokens, out_size, out_stride,
                    ITEM_BYTES, SCALES, HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, THIRD,
                )  # fmt: skip


@gluon.jit
def _keep(
    a, b, c, kept,
    GATED: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Put the sums of a piece aside, where the same threads fetch them from: there are no registers for both."""
    halves: gl.constexpr = 2 if GATED else 1
    gl.store(_places(kept, a, BLOCK_M, halves * FIRST), a)
    if SECOND > 0:
        gl.store(_places(kept + BLOCK_M * halves * FIRST, b, BLOCK_M, halves * SECOND), b)
    if THIRD > 0:
        gl.store(_places(kept + BLOCK_M * halves * (FIRST + SECOND), c, BLOCK_M, halves * THIRD), c)


@gluon.jit
def _with_kept(
    a, b, c, kept,
    GATED: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """The sums that were put aside, and those of the next piece added to them."""
    halves: gl.constexpr = 2 if GATED else 1
    a += gl.load(_places(kept, a, BLOCK_M, halves * FIRST))
    if SECOND > 0:
        b += gl.load(_places(kept + BLOCK_M * halves * FIRST, b, BLOCK_M, halves * SECOND))
    if THIRD > 0:
        c += gl.load(_places(kept + BLOCK_M * halves * (FIRST + SECOND), c, BLOCK_M, halves * THIRD))
    return a, b, c


@gluon.jit
def _places(kept, sums, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr):
    """Where sums are kept: eight columns of all rows, then the next eight, so that a warp writes 256 bytes in a row.

    Columns are added to the pointer by themselves: a thread's places then are one register and constants.
    """
    layout: gl.constexpr = sums.type.layout
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return (kept + rows * 8)[:, None] + (columns // 8 * (8 * BLOCK_M) + columns % 8)[None, :]


@gluon.jit
def _products(
    rows, first, second, third, arrived, free, begin, count,
    GATED: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of a tile, [BLOCK_M, halves · width] for each width; `begin`: the program's units before."""
    halves: gl.constexpr = 2 if GATED else 1
    kinds: gl.constexpr = 1 + (SECOND > 0) + (THIRD > 0)
    item_bytes: gl.constexpr = first.dtype.primitive_bitwidth // 8
    a = _zeros(BLOCK_M, halves * FIRST, item_bytes)
    b = a
    if SECOND > 0:
        b = _zeros(BLOCK_M, halves * SECOND, item_bytes)
    c = a
    if THIRD > 0:
        c = _zeros(BLOCK_M, halves * THIRD, item_bytes)
    for unit in range(begin, begin + count):
        stage = unit % STAGES
        mbarrier.wait(arrived.index(stage), (unit // STAGES) & 1)
        x = rows.index(stage)
        a = warpgroup_mma(x, first.index(stage).permute((1, 0)), a, is_async=True)
        if SECOND > 0:
            b = warpgroup_mma(x, second.index(stage).permute((1, 0)), b, is_async=True)
        if THIRD > 0:
            c = warpgroup_mma(x, third.index(stage).permute((1, 0)), c, is_async=True)
        a, b, c = _wait(a, b, c, kinds, SECOND, THIRD)
        # Those of the block before are through; this one's are under way.
        mbarrier.arrive(free.index((unit + STAGES - 1) % STAGES), pred=unit > begin)
    a, b, c = _wait(a, b, c, 0, SECOND, THIRD)
    mbarrier.arrive(free.index((begin + count - 1) % STAGES))
    return a, b, c


@gluon.jit
def _zeros(BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, ITEM_BYTES: gl.constexpr):
    layout: gl.constexpr = _sums_layout(COLUMNS, gl.num_warps(), ITEM_BYTES)
    return gl.zeros([BLOCK_M, COLUMNS], gl.float32, layout)


@gluon.jit
def _wait(a, b, c, outstanding: gl.constexpr, SECOND: gl.constexpr, THIRD: gl.constexpr):
    if THIRD > 0:
        a, b, c = warpgroup_mma_wait(outstanding, deps=[a, b, c])
    elif SECOND > 0:
        a, b = warpgroup_mma_wait(outstanding, deps=[a, b])
    else:
        a = warpgroup_mma_wait(outstanding, deps=[a])
    return a, b, c


@gluon.jit
def _finish(
    sums, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
    first_column, first_token, num_tokens, out_size, out_stride,
    ITEM_BYTES: gl.constexpr, SCALES: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Scales, bias, the gate, the residual; write."""
    layout: gl.constexpr = _out_layout(COLUMNS, gl.num_warps())
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    tokens = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    places = out_ptr + tokens[:, None].to(gl.int64) * out_stride + columns[None, :]
    within = columns < out_size
    mask = (tokens < num_tokens)[:, None] & within[None, :]
    halves: gl.constexpr = 2 if GATED else 1
    sums_layout: gl.constexpr = _sums_layout(halves * COLUMNS, gl.num_warps(), ITEM_BYTES)
    place = gl.arange(0, halves * COLUMNS, gl.SliceLayout(0, sums_layout))
    column = first_column + place % COLUMNS
    if SCALES == BY_ROW:
        row = gl.minimum(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, sums_layout)), num_tokens - 1)
        scaled = place // COLUMNS * out_size + gl.minimum(column, out_size - 1)
        scales = gl.load(x_scales_ptr + row)[:, None] * gl.load(weight_scales_ptr + scaled)[None, :]
        sums = rounded_product(sums, scales)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + place // COLUMNS * out_size + column, mask=column < out_size, other=0.0)
        sums += bias.to(gl.float32)[None, :]
    if GATED:
        gate, up = sums.reshape([BLOCK_M, 2, COLUMNS]).permute((0, 2, 1)).split()
        sums = gate / (1.0 + gl.exp(-gate)) * up
    if HAS_RESIDUAL:
        out = gl.convert_layout(sums, layout)
        out += gl.load(places, mask=mask, other=0.0).to(gl.float32)
        gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        gl.store(places, gl.convert_layout(sums.to(out_ptr.dtype.element_ty), layout), mask=mask)
