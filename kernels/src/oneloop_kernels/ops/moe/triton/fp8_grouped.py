"""The experts' products of 8-bit floats on Hopper for many tokens: as `grouped`, with scales."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.moe.triton.grouped import (
    COPY_REGISTERS,
    GATHER_REGISTERS,
    GATHER_WARPS,
    copy,
    fetch,
    gather,
    out_layout,
    sums_layout,
    write,
)
from oneloop_kernels.ops.moe.triton.routing import TABLE


@gluon.jit
def fp8_grouped_kernel(
    x_ptr, x_desc, x_scales_ptr, weight_desc, scales_ptr, out_ptr, factors_ptr, bins_ptr, tiles_ptr, out_size, num_rows,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BY_BLOCK: gl.constexpr, SCALE_ROWS: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """See grouped_kernel, and of scales fp8_experts_kernel, whose x is quantised. Grid: any size."""
    halves: gl.constexpr = 2 if GATED else 1
    rows = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    weights = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, halves * BLOCK_N, BLOCK_K], weight_desc.layout
    )
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1 + (32 * GATHER_WARPS if GATED else 0))
        mbarrier.init(free.index(stage), count=1)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_items = fetch(tiles_ptr) * gl.cdiv(out_size, BLOCK_N)
    if GATED:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        rows, weights, arrived, free, x_scales_ptr, scales_ptr, out_ptr, factors_ptr, bins_ptr,
                        tiles_ptr, num_items, out_size, num_rows,
                        IN_SIZE, GATED, BY_BLOCK, SCALE_ROWS, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                    ),
                ),
                (
                    copy,
                    (
                        x_desc, weight_desc, rows, weights, arrived, free, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 1,
                    ),
                ),
                (
                    gather,
                    (
                        x_ptr, rows, arrived, free, bins_ptr, tiles_ptr, num_items, out_size,
                        IN_SIZE, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 1,
                    ),
                ),
            ],
            [1, GATHER_WARPS],
            [COPY_REGISTERS, GATHER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        rows, weights, arrived, free, x_scales_ptr, scales_ptr, out_ptr, factors_ptr, bins_ptr,
                        tiles_ptr, num_items, out_size, num_rows,
                        IN_SIZE, GATED, BY_BLOCK, SCALE_ROWS, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                    ),
                ),
                (
                    copy,
                    (
                        x_desc, weight_desc, rows, weights, arrived, free, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 1,
                    ),
                ),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _multiply(
    rows, weights, arrived, free, x_scales_ptr, scales_ptr, out_ptr, factors_ptr, bins_ptr, tiles_ptr, num_items,
    out_size, num_rows,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BY_BLOCK: gl.constexpr, SCALE_ROWS: gl.constexpr, TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and write."""
    halves: gl.constexpr = 2 if GATED else 1
    layout: gl.constexpr = sums_layout(halves * BLOCK_N, gl.num_warps(), 1)
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    num_blocks = gl.cdiv(out_size, BLOCK_N)
    unit = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        place = tiles_ptr + TABLE + 4 * (item // num_blocks)
        expert = fetch(place)
        first = fetch(place + 1)
        count = fetch(place + 2) - first
        pairs_ptr = bins_ptr + fetch(place + 3)
        pairs = gl.load(pairs_ptr + index, mask=index < count, other=0, cache_modifier=".cg")
        if not GATED:  # long before they are needed
            factors = gl.load(factors_ptr + pairs, cache_modifier=".cg")
        sources = pairs // TOP_K if GATED else gl.minimum(first + index, num_rows - 1)
        first_column = item % num_blocks * BLOCK_N
        first_row = expert.to(gl.int64) * (halves * out_size) + first_column
        if BY_BLOCK:
            sums, unit = _sums_by_block(
                rows, weights, arrived, free, x_scales_ptr + sources, scales_ptr, first_row, first_column, out_size,
                num_rows, unit, IN_SIZE, GATED, SCALE_ROWS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, layout,
            )  # fmt: skip
        else:
            sums, unit = _sums_by_row(
                rows, weights, arrived, free, unit, IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, layout
            )
            place_of_scales = _scale_rows(first_row, first_column, out_size, halves, BLOCK_N, layout)
            scales = gl.load(x_scales_ptr + sources)[:, None] * gl.load(scales_ptr + place_of_scales)[None, :]
            sums = sums * scales
        if GATED:
            gate, up = sums.reshape([BLOCK_M, 2, BLOCK_N]).permute((0, 2, 1)).split()
            inner = (gate / (1.0 + gl.exp(-gate)) * up).to(out_ptr.dtype.element_ty)
            out_rows = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, out_layout(BLOCK_N, gl.num_warps())))
            write(inner, out_ptr, out_rows, first + count, first_column, out_size, BLOCK_M, BLOCK_N)
        else:
            half: gl.constexpr = BLOCK_N // 2
            low, high = (
                (sums * factors[:, None]).to(out_ptr.dtype.element_ty)
                .reshape([BLOCK_M, 2, half]).permute((0, 2, 1)).split()
            )  # fmt: skip
            own = gl.arange(0, BLOCK_M, gl.SliceLayout(1, out_layout(half, gl.num_warps())))
            out_rows = gl.load(pairs_ptr + own, mask=own < count, other=0x7FFFFFFF, cache_modifier=".cg")
            write(low, out_ptr, out_rows, 0x7FFFFFFF, first_column, out_size, BLOCK_M, half)
            write(high, out_ptr, out_rows, 0x7FFFFFFF, first_column + half, out_size, BLOCK_M, half)


@gluon.jit
def _scale_rows(
    first_row, first_column, out_size, halves: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr
):
    """Which rows of all weights a tile's columns are: the gate's, then up's."""
    column = gl.arange(0, halves * BLOCK_N, gl.SliceLayout(0, layout))
    within = gl.minimum(column % BLOCK_N, out_size - 1 - first_column)
    return first_row + within + column // BLOCK_N * out_size


@gluon.jit
def _sums_by_row(
    rows, weights, arrived, free, unit,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of one tile, and how many stages have been used. All columns are added up by the tensor cores."""
    halves: gl.constexpr = 2 if GATED else 1
    sums = gl.zeros([BLOCK_M, halves * BLOCK_N], gl.float32, layout)
    for column in range(0, IN_SIZE, BLOCK_K):
        stage = unit % STAGES
        mbarrier.wait(arrived.index(stage), (unit // STAGES) & 1)
        if GATED:
            fence_async_shared()  # what was gathered was not written by the copy engine
        sums = warpgroup_mma(rows.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        # Those of the block before are through; this one's are under way.
        mbarrier.arrive(free.index((unit + STAGES - 1) % STAGES), pred=column > 0)
        unit += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((unit + STAGES - 1) % STAGES))
    return sums, unit


@gluon.jit
def _sums_by_block(
    rows, weights, arrived, free, x_places, scales_ptr, first_row, first_column, out_size, num_rows, unit,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, SCALE_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The same, each block of columns scaled before it is added. Scales are asked for a block ahead."""
    halves: gl.constexpr = 2 if GATED else 1
    groups: gl.constexpr = (IN_SIZE + BLOCK_K - 1) // BLOCK_K
    gl.static_assert(SCALE_ROWS % BLOCK_N == 0, "a tile's rows share a scale")
    nothing = gl.zeros([BLOCK_M, halves * BLOCK_N], gl.float32, layout)
    sums = nothing
    is_up = gl.arange(0, halves * BLOCK_N, gl.SliceLayout(0, layout)) >= BLOCK_N
    places = scales_ptr + first_row // SCALE_ROWS * groups
    up_place = out_size // SCALE_ROWS * groups
    next_x, next_scale = gl.load(x_places), gl.load(places)
    next_up = next_scale
    if GATED:
        next_up = gl.load(places + up_place)
    for group in range(groups):
        stage = unit % STAGES
        x_scales, scale, up_scale = next_x, next_scale, next_up
        if group + 1 < groups:
            next_x, next_scale = gl.load(x_places + (group + 1) * num_rows), gl.load(places + group + 1)
            if GATED:
                next_up = gl.load(places + up_place + group + 1)
        mbarrier.wait(arrived.index(stage), (unit // STAGES) & 1)
        if GATED:
            fence_async_shared()  # what was gathered was not written by the copy engine
        part = warpgroup_mma(
            rows.index(stage), weights.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(free.index(stage))
        if GATED:
            sums += part * (x_scales[:, None] * gl.where(is_up, up_scale, scale)[None, :])
        else:
            sums += part * (x_scales * scale)[:, None]
        unit += 1
    return sums, unit
