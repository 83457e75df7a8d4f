"""A linear map on Hopper: weights stream through shared memory into the tensor cores.

The work, blocks of BLOCK_K columns of tiles of BLOCK_N results, is numbered tile by tile and cut into equal contiguous
ranges, one per program, so that every multiprocessor reads the same number of bytes whatever the shape. A program's
copies run STAGES blocks ahead across its tiles. The first of them start before the kernel waits for the one before it:
weights are constant, and memory stays busy while the rows of x are still being made.

Of a tile that is cut, each program leaves its sums: slot 2 · program for the first tile of its range, + 1 for one that
goes on in the next range. Who comes last adds them up in the order of their columns, so that results do not depend on
who that was.

One warp copies, the others multiply: to issue a copy takes barriers, which would hold up the products.

x and W have 16 bits, or 8 (e4m3) and scales: one per row of either, applied to the sums; or one per block, applied to
the products of each.
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
BY_BLOCK = gl.constexpr(2)
"""SCALES: what has a scale; 0: nothing."""


@gluon.constexpr_function
def _sums_layout(block_m, block_n, num_warps, item_bytes):
    """Sixteen results to a warp, and where there are more warps than that, the rows of x divided among them."""
    down = min(num_warps, block_n // 16)
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[down, num_warps // down],
        instr_shape=[16, block_m * down // num_warps, 32 // item_bytes],
    )


@gluon.constexpr_function
def _out_layout(block_m, block_n, num_warps, sums):
    """Eight results of a row, 16 bytes, to a thread, where that pays the way through shared memory and fits it."""
    if block_m < 32 or block_m * block_n > 4096:
        return sums
    return gl.BlockedLayout([8, 1], [8, 4], [block_n // 64, num_warps * 64 // block_n], [0, 1])


@gluon.jit(do_not_specialize=["num_tokens", "in_size"])
def stream_kernel(
    x_desc, weight_desc, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, in_size, out_size, out_stride,
    SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, WHOLE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """out (or +=, with HAS_RESIDUAL) = silu(a) · b where [a; b] = W · xᵀ + bias, or that product itself.

    x_desc, weight_desc: tensor maps with boxes [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]; what lies outside reads as
    zero. BLOCK_N ≥ 64. out_size: columns of the result.
    SCALES, of float32: BY_ROW: x_scales [num_tokens], weight_scales [rows of W]; BY_BLOCK: x_scales [blocks of columns,
    num_tokens], weight_scales [rows of W / SCALE_ROWS, blocks of columns].
    partial: float32 [2 · programs, 2 if GATED else 1, BLOCK_N · BLOCK_M], uninitialised. tickets: int32, one per tile,
    0 before and after. MERGE: partial sums that are fetched at a time. WHOLE: ranges end where tiles end, partial and
    tickets are not used. Grid: any size up to the number of blocks, or of tiles with WHOLE.
    """
    halves: gl.constexpr = 2 if GATED else 1
    num_blocks = gl.cdiv(in_size, BLOCK_K)
    token_tiles = gl.cdiv(num_tokens, BLOCK_M)
    grain = num_blocks if WHOLE else 1
    total = gl.cdiv(out_size, BLOCK_N) * token_tiles * num_blocks // grain
    base, extra = total // gl.num_programs(0), total % gl.num_programs(0)
    program = gl.program_id(0)
    begin = (program * base + gl.minimum(program, extra)) * grain
    end = begin + (base + (program < extra).to(gl.int32)) * grain

    weights = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES * halves, BLOCK_N, BLOCK_K], weight_desc.layout
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
                    weights, rows, arrived, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partial_ptr,
                    tickets_ptr, num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra,
                    begin, end, SCALES, SCALE_ROWS, HAS_BIAS, GATED, HAS_RESIDUAL, BLOCK_M, BLOCK_N, STAGES, MERGE,
                    WHOLE, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, weight_desc, weights, rows, arrived, free, num_blocks, token_tiles, out_size, begin, end,
                    GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, weight_desc, weights, rows, arrived, free, num_blocks, token_tiles, out_size, begin, end,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies: STAGES blocks ahead, the first weights before its kernel's turn has come."""
    width = num_blocks * BLOCK_K
    ahead = gl.minimum(end - begin, STAGES)
    tile = begin // num_blocks
    column = (begin - tile * num_blocks) * BLOCK_K
    weight_tile, weight_column = tile, column
    for stage in range(ahead):
        _copy_weights(
            weight_desc, weights, arrived, stage, weight_tile // token_tiles * BLOCK_N, weight_column, out_size,
            GATED, BLOCK_M, BLOCK_N, BLOCK_K,
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
            weight_desc, weights, arrived, stage, tile // token_tiles * BLOCK_N, column, out_size,
            GATED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _copy_rows(x_desc, rows, arrived, stage, tile % token_tiles * BLOCK_M, column)
        tile, column = _following(tile, column, width, BLOCK_K)


@gluon.jit
def _following(tile, column, width, BLOCK_K: gl.constexpr):
    """Where the next unit is."""
    column += BLOCK_K
    wrapped = column >= width
    return tile + wrapped.to(gl.int32), gl.where(wrapped, 0, column)


@gluon.jit
def _multiply(
    weights, rows, arrived, free, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, partial_ptr, tickets_ptr,
    num_tokens, num_blocks, token_tiles, out_size, out_stride, program, base, extra, begin, end,
    SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    MERGE: gl.constexpr, WHOLE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and finish."""
    per_thread: gl.constexpr = BLOCK_M * BLOCK_N // (32 * gl.num_warps())
    EARLY: gl.constexpr = per_thread <= 32  # there are no registers for more
    layout: gl.constexpr = _sums_layout(
        BLOCK_M, BLOCK_N, gl.num_warps(), weights.dtype.primitive_bitwidth // 8
    )
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
        if HAS_RESIDUAL and EARLY:
            residual = gl.load(places, mask=mask, other=0.0)  # long before it is needed
        first_column = tile // token_tiles * BLOCK_N
        first_token = tile % token_tiles * BLOCK_M
        if SCALES == BY_BLOCK:
            gate, up = _scaled_products(
                weights, rows, arrived, free, x_scales_ptr, weight_scales_ptr, unit - begin, first, count, num_blocks,
                first_column, first_token, num_tokens, out_size,
                SCALE_ROWS, GATED, BLOCK_M, BLOCK_N, STAGES, layout,
            )  # fmt: skip
        else:
            gate, up = _products(
                weights, rows, arrived, free, unit - begin, count, GATED, BLOCK_M, BLOCK_N, STAGES, layout
            )
        whole = count == num_blocks
        if not WHOLE:
            if not whole:
                second = (unit != begin).to(gl.int32)
                whole, gate, up = _settle(
                    gate, up, partial_ptr, tickets_ptr, program, second, tile, num_blocks, base, extra,
                    GATED, BLOCK_M, BLOCK_N, MERGE, layout,
                )  # fmt: skip
        if whole:
            if SCALES == BY_ROW:
                gate, up = _scale_sums(
                    gate, up, x_scales_ptr, weight_scales_ptr, first_column, first_token, num_tokens, out_size,
                    GATED, BLOCK_M, BLOCK_N, layout,
                )  # fmt: skip
            gate = _activate(gate, up, bias_ptr, first_column, out_size, HAS_BIAS, GATED, BLOCK_N, layout)
            out = gl.convert_layout(gate, out_layout)
            if HAS_RESIDUAL and EARLY:
                out += residual.to(gl.float32)
            elif HAS_RESIDUAL:
                out += gl.load(places, mask=mask, other=0.0).to(gl.float32)
            gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
        unit += count


@gluon.jit
def _products(
    weights, rows, arrived, free, begin, count,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of so many units of a tile, from the program's unit `begin` on: gate, up [BLOCK_N, BLOCK_M]."""
    halves: gl.constexpr = 2 if GATED else 1
    gate = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    up = gate
    if GATED:
        up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    for step in range(begin, begin + count):
        stage = step % STAGES
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        x = rows.index(stage).permute((1, 0))
        gate = warpgroup_mma(weights.index(stage * halves), x, gate, is_async=True)
        if GATED:
            up = warpgroup_mma(weights.index(stage * halves + 1), x, up, is_async=True)
            gate, up = warpgroup_mma_wait(2, deps=[gate, up])
        else:
            gate = warpgroup_mma_wait(1, deps=[gate])
        # Those of the block before are through; this one's are under way.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=step > begin)
    if GATED:
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
    else:
        gate = warpgroup_mma_wait(0, deps=[gate])
    mbarrier.arrive(free.index((begin + count - 1) % STAGES))
    return gate, up


@gluon.jit
def _scaled_products(
    weights, rows, arrived, free, x_scales_ptr, weight_scales_ptr, begin, first, count, num_blocks,
    first_column, first_token, num_tokens, out_size,
    SCALE_ROWS: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """As _products, of blocks that have scales; `first`: the tile's block that comes first."""
    halves: gl.constexpr = 2 if GATED else 1
    gate = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    up = gate
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    tokens = gl.minimum(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout)), num_tokens - 1)
    if SCALE_ROWS % BLOCK_N == 0:  # one for all of a tile's weights
        columns = first_column
    else:
        columns = gl.minimum(first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), out_size - 1)
    gate_places = weight_scales_ptr + columns // SCALE_ROWS * num_blocks + first
    up_places = gate_places + out_size // SCALE_ROWS * num_blocks
    x_places = x_scales_ptr + tokens + first * num_tokens
    x_scales, gate_scales = gl.load(x_places), gl.load(gate_places)
    up_scales = gate_scales
    if GATED:
        up_scales = gl.load(up_places)
    for step in range(begin, begin + count):
        stage = step % STAGES
        x_factors, gate_factors, up_factors = x_scales, gate_scales, up_scales
        if step + 1 < begin + count:  # long before they are needed
            index = step + 1 - begin
            x_scales = gl.load(x_places + index * num_tokens)
            gate_scales = gl.load(gate_places + index)
            if GATED:
                up_scales = gl.load(up_places + index)
        mbarrier.wait(arrived.index(stage), (step // STAGES) & 1)
        x = rows.index(stage).permute((1, 0))
        gate_part = warpgroup_mma(weights.index(stage * halves), x, nothing, use_acc=False, is_async=True)
        if GATED:
            up_part = warpgroup_mma(
                weights.index(stage * halves + 1), x, nothing, use_acc=False, is_async=True
            )
            gate_part, up_part = warpgroup_mma_wait(0, deps=[gate_part, up_part])
            up += up_part * _factors(up_factors, x_factors, SCALE_ROWS % BLOCK_N == 0)
        else:
            gate_part = warpgroup_mma_wait(0, deps=[gate_part])
        mbarrier.arrive(free.index(stage))
        gate += gate_part * _factors(gate_factors, x_factors, SCALE_ROWS % BLOCK_N == 0)
    return gate, up


@gluon.jit
def _factors(weight_scales, x_scales, UNIFORM: gl.constexpr):
    if UNIFORM:
        factors = (weight_scales * x_scales)[None, :]
    else:
        factors = weight_scales[:, None] * x_scales[None, :]
    return factors


@gluon.jit
def _scale_sums(
    gate, up, x_scales_ptr, weight_scales_ptr, first_column, first_token, num_tokens, out_size,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of what has a scale per row."""
    columns = gl.minimum(first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), out_size - 1)
    tokens = gl.minimum(first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout)), num_tokens - 1)
    x_scales = gl.load(x_scales_ptr + tokens)[None, :]
    gate = rounded_product(gate, gl.load(weight_scales_ptr + columns)[:, None] * x_scales)
    if GATED:
        up = rounded_product(up, gl.load(weight_scales_ptr + out_size + columns)[:, None] * x_scales)
    return gate, up


@gluon.jit
def _settle(
    gate, up, partial_ptr, tickets_ptr, program, second, tile, num_blocks, base, extra,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MERGE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Leave the sums of a piece of a tile; if it is the last to come, whole is true and the sums are the tile's."""
    _leave(partial_ptr, 2 * program + second, gate, up, GATED, BLOCK_M, BLOCK_N, layout)
    first_unit = tile * num_blocks
    first_program = _program_of(first_unit, base, extra)
    last_program = _program_of(first_unit + num_blocks - 1, base, extra)
    gl.thread_barrier()  # all of the sums are written before the ticket is taken
    ticket = gl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu")
    whole = ticket == last_program - first_program
    if whole:
        gl.store(tickets_ptr + tile, 0)
        starts_before = first_program * base + gl.minimum(first_program, extra) < first_unit
        gate, up = _merge(
            partial_ptr, first_program, last_program, starts_before.to(gl.int32),
            GATED, BLOCK_M, BLOCK_N, MERGE, layout,
        )  # fmt: skip
    return whole, gate, up


@gluon.jit
def _copy_weights(
    weight_desc, weights, arrived, stage, row, column, out_size,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    halves: gl.constexpr = 2 if GATED else 1
    barrier = arrived.index(stage)
    item_bytes: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    mbarrier.expect(barrier, item_bytes * (halves * BLOCK_N + BLOCK_M) * BLOCK_K)
    tma.async_copy_global_to_shared(weight_desc, [row, column], barrier, weights.index(stage * halves))
    if GATED:
        tma.async_copy_global_to_shared(
            weight_desc, [out_size + row, column], barrier, weights.index(stage * halves + 1)
        )


@gluon.jit
def _copy_rows(x_desc, rows, arrived, stage, row, column):
    """Ask for a unit's rows of x."""
    tma.async_copy_global_to_shared(x_desc, [row, column], arrived.index(stage), rows.index(stage))


@gluon.jit
def _program_of(unit, base, extra):
    """Whose range has this unit. Every range has one at least."""
    longer = extra * (base + 1)
    return gl.where(unit < longer, unit // (base + 1), extra + (unit - longer) // base)


@gluon.jit
def _places(BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Offsets in a tile of partial sums: eight tokens side by side, so that a warp writes 256 bytes in a row."""
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    return columns[:, None] * 8 + (tokens // 8 * (8 * BLOCK_N) + tokens % 8)[None, :]


@gluon.jit
def _leave(
    partial_ptr, slot, gate, up,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    halves: gl.constexpr = 2 if GATED else 1
    places = partial_ptr + slot * (halves * BLOCK_N * BLOCK_M) + _places(BLOCK_M, BLOCK_N, layout)
    gl.store(places, gate)
    if GATED:
        gl.store(places + BLOCK_N * BLOCK_M, up)


@gluon.jit
def _merge(
    partial_ptr, first, last, first_is_second,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MERGE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sums of the programs first … last, in that order. Past the first-level cache: others wrote while we ran."""
    halves: gl.constexpr = 2 if GATED else 1
    places = partial_ptr + _places(BLOCK_M, BLOCK_N, layout)
    gate = gl.load(
        places + (2 * first + first_is_second) * (halves * BLOCK_N * BLOCK_M), cache_modifier=".cg"
    )
    up = gate
    if GATED:
        up = gl.load(
            places + (2 * first + first_is_second) * (halves * BLOCK_N * BLOCK_M) + BLOCK_N * BLOCK_M,
            cache_modifier=".cg",
        )
    for start in range(first + 1, last + 1, MERGE):
        for index in gl.static_range(MERGE):
            part = places + 2 * (start + index) * (halves * BLOCK_N * BLOCK_M)
            live = start + index <= last
            gate += gl.load(part, mask=live, other=0.0, cache_modifier=".cg")
            if GATED:
                up += gl.load(part + BLOCK_N * BLOCK_M, mask=live, other=0.0, cache_modifier=".cg")
    return gate, up


@gluon.jit
def _activate(
    gate, up, bias_ptr, first_column, out_size,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Bias, then the gate."""
    if HAS_BIAS:
        columns = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
        within = columns < out_size
        gate += gl.load(bias_ptr + columns, mask=within, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up += gl.load(bias_ptr + out_size + columns, mask=within, other=0.0).to(gl.float32)[:, None]
    if GATED:
        gate = gate / (1.0 + gl.exp(-gate)) * up
    return gate
