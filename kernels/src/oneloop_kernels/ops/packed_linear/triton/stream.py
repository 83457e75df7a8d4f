"""A packed linear map on Hopper: as `linear.triton.stream`, but the weights become those of x's type in registers.

Tiles of packed numbers and their scales stream through shared memory; each thread reads its own numbers, 16 bytes at a
time, and unpacks them to the registers that the tensor cores multiply from, while they multiply those before.

Unpacking takes the time that memory leaves. So where a group is a whole tile and rows are few, sums are scaled in the
place of numbers. Those are unpacked with a shift and a mask, which leaves a power of two on top, and that is subtracted
with the zero. Where there are offsets, the tensor cores also multiply by ones: so many times that product is what the
powers and the offsets add.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.linear.triton.stream import (
    PRODUCER_REGISTERS,
    _activate,
    _following,
    _out_layout,
    _settle,
)
from oneloop_kernels.ops.packed_linear.triton.registers import (
    TILE_COLUMNS,
    TILE_ROWS,
    raw_numbers,
    scaled_weights,
    tile_scale,
)

FEW_ROWS = gl.constexpr(16)


@gluon.constexpr_function
def _layout_of(block_m, num_warps):
    """Of the sums: of few rows those of a warp's instructions, else of four warps'."""
    if block_m <= 16:
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, block_m, 16]
    )


@gluon.jit(do_not_specialize=["num_tokens", "in_size"])
def stream_kernel(
    x_desc, words_desc, high_desc, params_desc, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, in_size, out_size, up_tile, out_stride,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = W · xᵀ + bias, or that product itself.

    x_desc: boxes [BLOCK_M, 128]. words_desc, high_desc (not used of 4 bits): of the tensors seen as
    [row tiles, 4 · column tiles, 256], boxes [1, 4 · COLUMN_TILES, 256]. params_desc: seen as
    [row tiles, lines, …] with 256 numbers to a line at most (a longer one is copied in parts, each box of all its
    lines), boxes [1, the lines of COLUMN_TILES tiles, …]. out_size: columns of the result; up_tile: the row tile where
    up begins. ON_SUMS: scaled as sums; 4 bits, GROUPS = 1. Four warps. The rest as in `linear.triton.stream`.
    """
    halves: gl.constexpr = 2 if GATED else 1
    num_blocks = gl.cdiv(in_size, TILE_COLUMNS * COLUMN_TILES)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    total = gl.cdiv(out_size, TILE_ROWS) * token_tiles * num_blocks
    base, extra = total // gl.num_programs(0), total % gl.num_programs(0)
    program = gl.program_id(0)
    begin = program * base + gl.minimum(program, extra)
    end = begin + base + (program < extra).to(gl.int32)

    words = gl.allocate_shared_memory(
        gl.int32, [STAGES * halves, 1, 4 * COLUMN_TILES, 256], words_desc.layout
    )
    high = words
    if BITS > 4:
        high = gl.allocate_shared_memory(
            high_desc.dtype, [STAGES * halves, 1, 4 * COLUMN_TILES, 256], high_desc.layout
        )
    params_box: gl.constexpr = params_desc.block_type.shape
    params = gl.allocate_shared_memory(
        gl.int32, [STAGES * halves, 1, params_box[1], params_box[2]], params_desc.layout
    )
    rows = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * COLUMN_TILES, BLOCK_M, TILE_COLUMNS], x_desc.layout
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
                    words, high, params, rows, arrived, rows_arrived, free, bias_ptr, out_ptr, partial_ptr,
                    tickets_ptr, num_tokens, num_blocks, token_tiles, out_size, out_stride, program,
                    base, extra, begin, end,
                    HAS_BIAS, GATED, HAS_RESIDUAL, BITS, SHIFT, GROUPS, ON_SUMS,
                    BLOCK_M, COLUMN_TILES, STAGES, MERGE, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, words_desc, high_desc, params_desc, words, high, params, rows,
                    arrived, rows_arrived, free, num_blocks, token_tiles, up_tile, begin, end,
                    GATED, BITS, BLOCK_M, COLUMN_TILES, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, words_desc, high_desc, params_desc, words, high, params, rows, arrived, rows_arrived,
    free, num_blocks, token_tiles, up_tile, begin, end,
    GATED: gl.constexpr, BITS: gl.constexpr, BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come."""
    ahead = gl.minimum(end - begin, STAGES)
    tile = begin // num_blocks
    block = begin - tile * num_blocks
    weight_tile, weight_block = tile, block
    for stage in range(ahead):
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, arrived, stage,
            weight_tile // token_tiles, weight_block, up_tile, GATED, BITS, COLUMN_TILES,
        )  # fmt: skip
        weight_tile, weight_block = _following(weight_tile, weight_block, num_blocks, 1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel's copies start while this one runs
        tl.extra.cuda.gdc_wait()
    for stage in range(ahead):
        _copy_rows(x_desc, rows, rows_arrived, stage, tile % token_tiles * BLOCK_M, block, COLUMN_TILES)
        tile, block = _following(tile, block, num_blocks, 1)
    for step in range(STAGES, end - begin):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, arrived, stage,
            tile // token_tiles, block, up_tile, GATED, BITS, COLUMN_TILES,
        )  # fmt: skip
        _copy_rows(x_desc, rows, rows_arrived, stage, tile % token_tiles * BLOCK_M, block, COLUMN_TILES)
        tile, block = _following(tile, block, num_blocks, 1)


@gluon.jit
def _copy_weights(
    words_desc, high_desc, params_desc, words, high, params, arrived, stage, row_tile, block,
    up_tile, GATED: gl.constexpr, BITS: gl.constexpr, COLUMN_TILES: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights."""
    halves: gl.constexpr = 2 if GATED else 1
    num_bytes: gl.constexpr = (
        words_desc.block_type.nbytes
        + params_desc.block_type.nbytes
        + (high_desc.block_type.nbytes if BITS > 4 else 0)
    )
    barrier = arrived.index(stage)
    mbarrier.expect(barrier, halves * num_bytes)
    column_tile = block * COLUMN_TILES
    for half in gl.static_range(halves):
        row = row_tile + half * up_tile
        place = stage * halves + half
        tma.async_copy_global_to_shared(words_desc, [row, 4 * column_tile, 0], barrier, words.index(place))
        if BITS > 4:
            tma.async_copy_global_to_shared(high_desc, [row, 4 * column_tile, 0], barrier, high.index(place))
        tma.async_copy_global_to_shared(
            params_desc, [row, params.shape[2] * block, 0], barrier, params.index(place)
        )


@gluon.jit
def _copy_rows(x_desc, rows, rows_arrived, stage, row, block, COLUMN_TILES: gl.constexpr):
    """Ask for a unit's rows of x."""
    barrier = rows_arrived.index(stage)
    mbarrier.expect(barrier, COLUMN_TILES * x_desc.block_type.nbytes)
    for tile in gl.static_range(COLUMN_TILES):
        column = (block * COLUMN_TILES + tile) * TILE_COLUMNS
        tma.async_copy_global_to_shared(
            x_desc, [row, column], barrier, rows.index(stage * COLUMN_TILES + tile)
        )


@gluon.jit
def _multiply(
    words, high, params, rows, arrived, rows_arrived, free, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply and finish."""
    layout: gl.constexpr = _layout_of(BLOCK_M, gl.num_warps())
    out_layout: gl.constexpr = _out_layout(BLOCK_M, TILE_ROWS, gl.num_warps(), layout)
    EARLY: gl.constexpr = BLOCK_M <= FEW_ROWS  # there are no registers for more
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # the kernel before may read what is written here, or write what is added
    unit = begin
    while unit < end:
        tile = unit // num_blocks
        first = unit - tile * num_blocks
        count = gl.minimum(end - unit, num_blocks - first)
        first_column = tile // token_tiles * TILE_ROWS
        columns = first_column + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, out_layout))
        tokens = tile % token_tiles * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out_layout))
        places = out_ptr + tokens[None, :].to(gl.int64) * out_stride + columns[:, None]
        mask = (columns < out_size)[:, None] & (tokens < num_tokens)[None, :]
        if HAS_RESIDUAL and EARLY:
            residual = gl.load(places, mask=mask, other=0.0)  # long before it is needed
        if BLOCK_M <= FEW_ROWS:
            gate, up = _few_rows(
                words, high, params, rows, arrived, rows_arrived, free, unit - begin, count,
                GATED, BITS, SHIFT, GROUPS, ON_SUMS, BLOCK_M, COLUMN_TILES, STAGES, layout,
            )  # fmt: skip
        elif GATED:
            gate, up = _gated_products(
                words, high, params, rows, arrived, rows_arrived, free, unit - begin, count,
                BITS, SHIFT, GROUPS, BLOCK_M, COLUMN_TILES, STAGES, layout,
            )  # fmt: skip
        else:
            gate = _products(
                words, high, params, rows, arrived, rows_arrived, free, unit - begin, count,
                BITS, SHIFT, GROUPS, BLOCK_M, COLUMN_TILES, STAGES, layout,
            )  # fmt: skip
            up = gate
        whole = count == num_blocks
        if not whole:
            second = (unit != begin).to(gl.int32)
            whole, gate, up = _settle(
                gate, up, partial_ptr, tickets_ptr, program, second, tile, num_blocks, base, extra,
                GATED, BLOCK_M, TILE_ROWS, MERGE, layout,
            )  # fmt: skip
        if whole:
            gate = _activate(gate, up, bias_ptr, first_column, out_size, HAS_BIAS, GATED, TILE_ROWS, layout)
            out = gl.convert_layout(gate, out_layout)
            if HAS_RESIDUAL and EARLY:
                out += residual.to(gl.float32)
            elif HAS_RESIDUAL:
                out += gl.load(places, mask=mask, other=0.0).to(gl.float32)
            gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
        unit += count


@gluon.jit
def _few_rows(
    words, high, params, rows, arrived, rows_arrived, free, begin, count,
    GATED: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As `_products`, by instructions of a warp: they need no agreement of four, and unpacking goes on beside them."""
    halves: gl.constexpr = 2 if GATED else 1
    gate = gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, layout)
    up = gate
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        for tile in gl.static_range(COLUMN_TILES):
            if ON_SUMS:
                weights = raw_numbers(
                    words, params, stage * halves, tile, SHIFT, COLUMN_TILES, rows.dtype, layout
                )
            else:
                weights = scaled_weights(
                    words,
                    high,
                    params,
                    stage * halves,
                    tile,
                    BITS,
                    SHIFT,
                    GROUPS,
                    COLUMN_TILES,
                    rows.dtype,
                    layout,
                )
            if tile == 0:
                mbarrier.wait(rows_arrived.index(stage), (step // STAGES) & 1)
            x_tile = rows.index(stage * COLUMN_TILES + tile)
            x = x_tile.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
            if ON_SUMS:
                sums = gate
                if SHIFT == "offset":
                    sums = _sums_of(x, BLOCK_M, layout)
                gate = _add_scaled(
                    gate, weights, x, sums, params, stage * halves, tile, SHIFT, COLUMN_TILES, layout
                )
            else:
                gate = mma_v2(weights, x, gate)
            if GATED:
                if ON_SUMS:
                    weights = raw_numbers(
                        words,
                        params,
                        stage * halves + 1,
                        tile,
                        SHIFT,
                        COLUMN_TILES,
                        rows.dtype,
                        layout,
                    )
                    up = _add_scaled(
                        up,
                        weights,
                        x,
                        sums,
                        params,
                        stage * halves + 1,
                        tile,
                        SHIFT,
                        COLUMN_TILES,
                        layout,
                    )
                else:
                    weights = scaled_weights(
                        words, high, params, stage * halves + 1, tile,
                        BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout,
                    )  # fmt: skip
                    up = mma_v2(weights, x, up)
        mbarrier.arrive(free.index(stage))
    return gate, up


@gluon.jit
def _sums_of(x, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """float32 [64, BLOCK_M]: the sum of each row of x in every row."""
    ones = gl.full([TILE_ROWS, TILE_COLUMNS], 1.0, x.dtype, gl.DotOperandLayout(0, layout, 2))
    return mma_v2(ones, x, gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, layout))


@gluon.jit
def _add_scaled(
    total, numbers, x, sums, params, place, tile,
    SHIFT: gl.constexpr, COLUMN_TILES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """total + scale · Σ (u − zero) x; with offsets total + scale · Σ (power + u) x + shift · Σ x."""
    found = mma_v2(numbers, x, gl.zeros(total.shape, gl.float32, layout))
    scale, shift = tile_scale(params, place, tile, SHIFT, COLUMN_TILES, x.dtype, layout)
    total += found * scale[:, None]
    if SHIFT == "offset":
        total += sums * shift[:, None]
    return total


@gluon.jit
def _products(
    words, high, params, rows, arrived, rows_arrived, free, begin, count,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of so many units of a tile, from the program's unit `begin` on: [64, BLOCK_M].

    A tile is unpacked while the one before it is multiplied. The tensor cores read their registers until that has been
    waited for, which therefore stands in the same turn of the loop: beyond it the same registers have the next tile.
    """
    sums = gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, layout)
    mbarrier.wait(arrived.index(begin % STAGES), (begin // STAGES) & 1)
    weights = scaled_weights(
        words, high, params, begin % STAGES, 0, BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout
    )
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(rows_arrived.index(stage), (step // STAGES) & 1)
        for tile in gl.static_range(COLUMN_TILES):
            x = rows.index(stage * COLUMN_TILES + tile).permute((1, 0))
            under_way = warpgroup_mma(weights, x, sums, is_async=True)
            following = weights
            if tile + 1 < COLUMN_TILES:
                following = scaled_weights(
                    words, high, params, stage, tile + 1,
                    BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout,
                )  # fmt: skip
            elif step + 1 < begin + count:
                next_stage = (step + 1) % STAGES
                mbarrier.wait(arrived.index(next_stage), ((step + 1) // STAGES) & 1)
                following = scaled_weights(
                    words, high, params, next_stage, 0,
                    BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout,
                )  # fmt: skip
            sums, _ = warpgroup_mma_wait(0, deps=[under_way, weights])
            weights = following
        mbarrier.arrive(free.index(stage))
    return sums


@gluon.jit
def _gated_products(
    words, high, params, rows, arrived, rows_arrived, free, begin, count,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As `_products`: gate, up. Of either, numbers are unpacked while the other's are multiplied."""
    zeros = gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, layout)
    gate = zeros
    up_under_way = warpgroup_mma_init(zeros)
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        for tile in gl.static_range(COLUMN_TILES):
            x = rows.index(stage * COLUMN_TILES + tile).permute((1, 0))
            weights = scaled_weights(
                words, high, params, stage * 2, tile,
                BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout,
            )  # fmt: skip
            up = warpgroup_mma_wait(0, deps=[up_under_way])
            if tile == 0:
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > begin)
                mbarrier.wait(rows_arrived.index(stage), (step // STAGES) & 1)
            gate_under_way = warpgroup_mma(weights, x, gate, is_async=True)
            up_weights = scaled_weights(
                words, high, params, stage * 2 + 1, tile,
                BITS, SHIFT, GROUPS, COLUMN_TILES, rows.dtype, layout,
            )  # fmt: skip
            gate, _ = warpgroup_mma_wait(0, deps=[gate_under_way, weights])
            up_under_way = warpgroup_mma(up_weights, x, up, is_async=True)
    up = warpgroup_mma_wait(0, deps=[up_under_way])
    mbarrier.arrive(free.index((begin + count - 1) % STAGES))
    return gate, up
