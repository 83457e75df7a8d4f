"""The experts' products on Hopper for many tokens: tiles of one expert's pairs times blocks of its results.

Programs stay, and take one tile and block after another: those that run at a time share experts and rows, so that
either comes from memory once. One warp copies weights. For gate and up, rows of x are where their tokens are, and two
warps gather them; for down they lie side by side, and are copied like weights. Four or eight warps multiply.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.moe.triton.routing import TABLE

GATHER_WARPS = gl.constexpr(2)
COPY_REGISTERS = gl.constexpr(24)
GATHER_REGISTERS = gl.constexpr(88)


@gluon.constexpr_function
def sums_layout(columns, num_warps, item_bytes):
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 32 // item_bytes]
    )


@gluon.constexpr_function
def out_layout(columns, num_warps):
    """Eight results of a row, 16 bytes, to a thread."""
    across = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def grouped_kernel(
    x_ptr, x_desc, weight_desc, out_ptr, factors_ptr, bins_ptr, tiles_ptr, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """As experts_kernel of tiles of the table: see there. Grid: any size.

    x_desc, weight_desc: tensor maps with boxes [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]; all experts' weights are one
    matrix. BLOCK_N: results of a tile; twice as many products with GATED.
    """
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
                        rows, weights, arrived, free, out_ptr, factors_ptr, bins_ptr, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                    ),
                ),
                (
                    copy,
                    (
                        x_desc, weight_desc, rows, weights, arrived, free, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 2,
                    ),
                ),
                (
                    gather,
                    (
                        x_ptr, rows, arrived, free, bins_ptr, tiles_ptr, num_items, out_size,
                        IN_SIZE, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 2,
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
                        rows, weights, arrived, free, out_ptr, factors_ptr, bins_ptr, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                    ),
                ),
                (
                    copy,
                    (
                        x_desc, weight_desc, rows, weights, arrived, free, tiles_ptr, num_items, out_size,
                        IN_SIZE, GATED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 2,
                    ),
                ),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip


@gluon.jit
def copy(
    x_desc, weight_desc, rows, weights, arrived, free, tiles_ptr, num_items, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, ITEM_BYTES: gl.constexpr,
):  # fmt: skip
    """The warp that copies weights, and rows that lie side by side."""
    halves: gl.constexpr = 2 if GATED else 1
    num_rows: gl.constexpr = halves * BLOCK_N + (0 if GATED else BLOCK_M)
    num_blocks = gl.cdiv(out_size, BLOCK_N)
    unit = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        place = tiles_ptr + TABLE + 4 * (item // num_blocks)
        weight_row = fetch(place) * (halves * out_size) + item % num_blocks * BLOCK_N
        first = fetch(place + 1)
        for column in range(0, IN_SIZE, BLOCK_K):
            stage = unit % STAGES
            mbarrier.wait(free.index(stage), (unit // STAGES - 1) & 1)
            barrier = arrived.index(stage)
            mbarrier.expect(barrier, ITEM_BYTES * num_rows * BLOCK_K)
            for half in gl.static_range(halves):
                tma.async_copy_global_to_shared(
                    weight_desc, [weight_row + half * out_size, column], barrier,
                    weights.index(stage).slice(half * BLOCK_N, BLOCK_N),
                )  # fmt: skip
            if not GATED:
                tma.async_copy_global_to_shared(x_desc, [first, column], barrier, rows.index(stage))
            unit += 1


@gluon.jit
def gather(
    x_ptr, rows, arrived, free, bins_ptr, tiles_ptr, num_items, out_size,
    IN_SIZE: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, ITEM_BYTES: gl.constexpr,
):  # fmt: skip
    """The warps that copy rows of x from where their tokens are. Rows behind a tile's last are zero."""
    piece: gl.constexpr = 16 // ITEM_BYTES
    layout: gl.constexpr = gl.BlockedLayout(
        [1, piece], [32 // (BLOCK_K // piece), BLOCK_K // piece], [gl.num_warps(), 1], [1, 0]
    )
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    num_blocks = gl.cdiv(out_size, BLOCK_N)
    unit = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        place = tiles_ptr + TABLE + 4 * (item // num_blocks)
        count = fetch(place + 2) - fetch(place + 1)
        live = (index < count)[:, None]
        pairs = gl.load(
            bins_ptr + fetch(place + 3) + index, mask=index < count, other=0, cache_modifier=".cg"
        )
        places = x_ptr + (pairs // TOP_K).to(gl.int64)[:, None] * IN_SIZE + columns[None, :]
        for column in range(0, IN_SIZE, BLOCK_K):
            stage = unit % STAGES
            mbarrier.wait(free.index(stage), (unit // STAGES - 1) & 1)
            mask = live
            if IN_SIZE % BLOCK_K != 0:
                mask &= (column + columns < IN_SIZE)[None, :]
            async_copy.async_copy_global_to_shared(rows.index(stage), places + column, mask=mask)
            async_copy.mbarrier_arrive(arrived.index(stage), increment_count=False)
            unit += 1
    async_copy.wait_group(0)


@gluon.jit
def _multiply(
    rows, weights, arrived, free, out_ptr, factors_ptr, bins_ptr, tiles_ptr, num_items, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and write."""
    halves: gl.constexpr = 2 if GATED else 1
    layout: gl.constexpr = sums_layout(halves * BLOCK_N, gl.num_warps(), 2)
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    num_blocks = gl.cdiv(out_size, BLOCK_N)
    unit = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        place = tiles_ptr + TABLE + 4 * (item // num_blocks)
        first = fetch(place + 1)
        count = fetch(place + 2) - first
        pairs_ptr = bins_ptr + fetch(place + 3)
        if not GATED:  # long before they are needed
            pairs = gl.load(pairs_ptr + index, mask=index < count, other=0, cache_modifier=".cg")
            factors = gl.load(factors_ptr + pairs, cache_modifier=".cg")
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
        first_column = item % num_blocks * BLOCK_N
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
def fetch(place):
    """Past the first-level cache, which may have what was there before."""
    return gl.load(place, cache_modifier=".cg")


@gluon.jit
def write(
    results, out_ptr, out_rows, end, first_column, out_size, BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr
):
    """Rows before `end` of the result."""
    layout: gl.constexpr = out_layout(COLUMNS, gl.num_warps())
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    places = out_ptr + out_rows.to(gl.int64)[:, None] * out_size + columns[None, :]
    mask = (out_rows < end)[:, None] & (columns < out_size)[None, :]
    gl.store(places, gl.convert_layout(results, layout), mask=mask)
