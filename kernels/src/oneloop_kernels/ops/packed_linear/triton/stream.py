"""A packed linear map on Hopper: as `linear.triton.stream`, but the weights become those of x's type in registers.

Tiles of packed numbers and their scales stream through shared memory; each thread reads its own numbers, 16 bytes at a
time, and unpacks them to the registers that the tensor cores multiply from, while they multiply those before.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    _copy_rows,
    _following,
    _out_layout,
    _settle,
    _sums_layout,
)
from oneloop_kernels.ops.packed_linear.triton.registers import unpack_asm, unpack_constraints

TILE_ROWS = gl.constexpr(64)
TILE_COLUMNS = gl.constexpr(128)


@gluon.constexpr_function
def _words_layout(tiles):
    """Of [tiles, column tiles, a, w, g, c, b, d]; see `packing`. Of scales too, where some dimensions are 1."""
    return gl.BlockedLayout(
        [1, 1, 1, 1, 1, 1, 2, 2],
        [1, 1, 1, 1, 8, 4, 1, 1],
        [tiles, 1, 1, 4, 1, 1, 1, 1],
        [7, 6, 5, 4, 3, 2, 1, 0],
    )


@gluon.constexpr_function
def _flat(rank):
    """Shared memory without a pattern."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.jit(do_not_specialize=["num_tokens", "in_size"])
def stream_kernel(
    x_desc, words_desc, high_desc, params_desc, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, in_size, out_size, up_tile, out_stride,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = W · xᵀ + bias, or that product itself.

    x_desc: boxes [BLOCK_M, 128 · COLUMN_TILES]. words_desc, high_desc (not used of 4 bits): of the tensors seen as
    [row tiles, 4 · column tiles, 256], boxes [BLOCK_N / 64, 4 · COLUMN_TILES, 256]. params_desc: seen as
    [row tiles, column tiles, 32 · GROUPS · kinds], boxes [BLOCK_N / 64, COLUMN_TILES, …]. out_size: columns of the
    result; up_tile: the row tile where up begins. BLOCK_N: 16 · warps. The rest as in `linear.triton.stream`.
    """
    BLOCK_K: gl.constexpr = TILE_COLUMNS * COLUMN_TILES
    halves: gl.constexpr = 2 if GATED else 1
    num_blocks = gl.cdiv(in_size, BLOCK_K)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    total = gl.cdiv(out_size, BLOCK_N) * token_tiles * num_blocks
    base, extra = total // gl.num_programs(0), total % gl.num_programs(0)
    program = gl.program_id(0)
    begin = program * base + gl.minimum(program, extra)
    end = begin + base + (program < extra).to(gl.int32)

    tiles: gl.constexpr = BLOCK_N // TILE_ROWS
    words = gl.allocate_shared_memory(
        gl.int32, [STAGES * halves, tiles, 4 * COLUMN_TILES, 256], words_desc.layout
    )
    high = words
    if BITS > 4:
        high = gl.allocate_shared_memory(
            high_desc.dtype, [STAGES * halves, tiles, 4 * COLUMN_TILES, 256], high_desc.layout
        )
    kinds: gl.constexpr = 1 if SHIFT == "none" else 2
    params = gl.allocate_shared_memory(
        gl.int32, [STAGES * halves, tiles, COLUMN_TILES, 32 * GROUPS * kinds], params_desc.layout
    )
    rows = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
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
                    words, high, params, rows, arrived, free, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
                    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
                    HAS_BIAS, GATED, HAS_RESIDUAL, BITS, SHIFT, GROUPS, BLOCK_M, BLOCK_N, COLUMN_TILES, STAGES,
                    MERGE, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, words_desc, high_desc, params_desc, words, high, params, rows, arrived, free,
                    num_blocks, token_tiles, up_tile, begin, end,
                    GATED, BITS, BLOCK_M, BLOCK_N, BLOCK_K, COLUMN_TILES, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, words_desc, high_desc, params_desc, words, high, params, rows, arrived, free,
    num_blocks, token_tiles, up_tile, begin, end,
    GATED: gl.constexpr, BITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come."""
    width = num_blocks * BLOCK_K
    ahead = gl.minimum(end - begin, STAGES)
    tile = begin // num_blocks
    column = (begin - tile * num_blocks) * BLOCK_K
    weight_tile, weight_column = tile, column
    for stage in range(ahead):
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, rows, arrived, stage,
            weight_tile // token_tiles * (BLOCK_N // TILE_ROWS), weight_column // TILE_COLUMNS, up_tile,
            GATED, BITS,
        )  # fmt: skip
        weight_tile, weight_column = _following(weight_tile, weight_column, width, BLOCK_K)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel's copies start while this one runs
        tl.extra.cuda.gdc_wait()
    for stage in range(ahead):
        _copy_rows(x_desc, rows, arrived, stage, tile % token_tiles * BLOCK_M, column)
        tile, column = _following(tile, column, width, BLOCK_K)
    for step in range(STAGES, end - begin):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES - 1) & 1)
        _copy_weights(
            words_desc, high_desc, params_desc, words, high, params, rows, arrived, stage,
            tile // token_tiles * (BLOCK_N // TILE_ROWS), column // TILE_COLUMNS, up_tile, GATED, BITS,
        )  # fmt: skip
        _copy_rows(x_desc, rows, arrived, stage, tile % token_tiles * BLOCK_M, column)
        tile, column = _following(tile, column, width, BLOCK_K)


@gluon.jit
def _copy_weights(
    words_desc, high_desc, params_desc, words, high, params, rows, arrived, stage, row_tile, column_tile, up_tile,
    GATED: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    halves: gl.constexpr = 2 if GATED else 1
    num_bytes: gl.constexpr = (
        words_desc.block_type.nbytes + params_desc.block_type.nbytes + (high_desc.block_type.nbytes if BITS > 4 else 0)
    )
    barrier = arrived.index(stage)
    mbarrier.expect(barrier, halves * num_bytes + 2 * rows.shape[1] * rows.shape[2])
    for half in gl.static_range(halves):
        row = row_tile + half * up_tile
        place = stage * halves + half
        tma.async_copy_global_to_shared(words_desc, [row, 4 * column_tile, 0], barrier, words.index(place))
        if BITS > 4:
            tma.async_copy_global_to_shared(high_desc, [row, 4 * column_tile, 0], barrier, high.index(place))
        tma.async_copy_global_to_shared(params_desc, [row, column_tile, 0], barrier, params.index(place))


@gluon.jit
def _multiply(
    words, high, params, rows, arrived, free, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply and finish."""
    layout: gl.constexpr = _sums_layout(BLOCK_M, BLOCK_N, gl.num_warps())
    out_layout: gl.constexpr = _out_layout(BLOCK_M, BLOCK_N, gl.num_warps(), layout)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # the kernel before may read what is written here, or write what is added
    unit = begin
    while unit < end:
        tile = unit // num_blocks
        first = unit - tile * num_blocks
        count = gl.minimum(end - unit, num_blocks - first)
        columns = tile // token_tiles * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, out_layout))
        tokens = tile % token_tiles * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out_layout))
        places = out_ptr + tokens[None, :].to(gl.int64) * out_stride + columns[:, None]
        mask = (columns < out_size)[:, None] & (tokens < num_tokens)[None, :]
        gate, up = _products(
            words, high, params, rows, arrived, free, unit - begin, count,
            GATED, BITS, SHIFT, GROUPS, BLOCK_M, BLOCK_N, COLUMN_TILES, STAGES, layout,
        )  # fmt: skip
        whole = count == num_blocks
        if not whole:
            second = (unit != begin).to(gl.int32)
            whole, gate, up = _settle(
                gate, up, partial_ptr, tickets_ptr, program, second, tile, num_blocks, base, extra,
                GATED, BLOCK_M, BLOCK_N, MERGE, layout,
            )  # fmt: skip
        if whole:
            first_column = tile // token_tiles * BLOCK_N
            gate = _activate(gate, up, bias_ptr, first_column, out_size, HAS_BIAS, GATED, BLOCK_N, layout)
            out = gl.convert_layout(gate, out_layout)
            if HAS_RESIDUAL:
                out += gl.load(places, mask=mask, other=0.0).to(gl.float32)
            gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
        unit += count


@gluon.jit
def _products(
    words, high, params, rows, arrived, free, begin, count,
    GATED: gl.constexpr, BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COLUMN_TILES: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Sums of so many units of a tile, from the program's unit `begin` on: gate, up [BLOCK_N, BLOCK_M]."""
    halves: gl.constexpr = 2 if GATED else 1
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    gate = zeros
    under_way = warpgroup_mma_init(zeros)  # up where gated, else gate: what the tensor cores add to last
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        x = rows.index(stage).permute((1, 0))
        weights = _weights(
            words, high, params, stage * halves, BITS, SHIFT, GROUPS, BLOCK_N, COLUMN_TILES, rows.dtype, layout
        )
        sums = warpgroup_mma_wait(0, deps=[under_way])
        # The products of the block before are through; these will be under way while the next weights are unpacked.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > begin)
        if GATED:
            gate_under_way = warpgroup_mma(weights, x, gate, is_async=True)
            weights = _weights(
                words, high, params, stage * halves + 1,
                BITS, SHIFT, GROUPS, BLOCK_N, COLUMN_TILES, rows.dtype, layout,
            )  # fmt: skip
            gate = warpgroup_mma_wait(0, deps=[gate_under_way])
        under_way = warpgroup_mma(weights, x, sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[under_way])
    mbarrier.arrive(free.index((begin + count - 1) % STAGES))
    if not GATED:
        gate = sums
    return gate, sums


@gluon.jit
def _weights(
    words, high, params, place,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    COLUMN_TILES: gl.constexpr, kind: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """[BLOCK_N, 128 · COLUMN_TILES] of a stage, as the tensor cores take them from registers."""
    tiles: gl.constexpr = BLOCK_N // TILE_ROWS
    layout: gl.constexpr = _words_layout(tiles)
    a: gl.constexpr = 2 if GROUPS > 1 else 1
    b: gl.constexpr = 2 if GROUPS > 2 else 1
    d: gl.constexpr = 2 if GROUPS > 4 else 1
    shape: gl.constexpr = [tiles, COLUMN_TILES, 2, 4, 8, 4, 2, 2]
    numbers = words.index(place)._reinterpret(gl.int32, shape, _flat(8)).load(layout)
    per_group: gl.constexpr = [tiles, COLUMN_TILES, a, 4, 8, 1, b, d]
    if SHIFT == "none":
        inputs = _twice(params.index(place)._reinterpret(gl.int32, per_group, _flat(8)).load(layout))
    else:
        both = params.index(place)._reinterpret(gl.int64, per_group, _flat(8)).load(layout)
        inputs = _twice(both.to(gl.int32)) + _twice((both >> 32).to(gl.int32))
    if BITS > 4:
        upper = high.index(place)._reinterpret(high.dtype, shape, _flat(8)).load(layout)
        inputs = (upper,) + inputs
    o = gl.inline_asm_elementwise(
        unpack_asm(BITS, SHIFT, kind == gl.bfloat16),
        unpack_constraints(BITS, SHIFT),
        (numbers,) + inputs,
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )
    even = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    odd = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    # [tiles, column tiles, a, w, g, c, b, h, r, s, d] → (tiles, w, r, g) × (column tiles, a, b, d, s, c, h)
    matrix = gl.join(even, odd).permute((0, 3, 8, 4, 1, 2, 6, 10, 9, 5, 7)).reshape([BLOCK_N, TILE_COLUMNS * COLUMN_TILES])
    weights = matrix.to(kind, bitcast=True)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)


@gluon.jit
def _twice(pairs):
    """The lower and the upper half of each, both given twice."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;",
        "=&r,=r,r",
        [pairs],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
