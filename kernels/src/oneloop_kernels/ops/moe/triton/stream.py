"""The experts' products on Hopper while weights are what takes the time: they stream through shared memory.

Tiles, BLOCK_N results of one expert's pairs, are dealt to programs that stay. One warp copies, STAGES blocks ahead
across its program's tiles; the others multiply, weights as the wide side (see `ops.linear.triton.stream`).

x comes by the copy engine too, which takes neighbouring rows. Behind gate and up the pairs lie in order. Before, either
all tokens of a small batch are one box, of which a tile takes the columns that are its expert's, or `gather_kernel` has
put their rows in order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from oneloop_kernels.ops.linear.triton.stream import (
    PRODUCER_REGISTERS,
    _out_layout,
    _products,
    _sums_layout,
)


@gluon.jit(do_not_specialize=["num_tokens"])
def stream_experts_kernel(
    x_desc, weight_desc, out_ptr, pairs_ptr, factors_ptr, ids_ptr, ranks_ptr, tiles_ptr, num_tokens, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BY_TOKEN: gl.constexpr, TOP_K: gl.constexpr,
    EXPERTS_PAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Of each pair: silu(gate · x) · (up · x) if GATED, else weight · x multiplied by the pair's factor.

    x_desc: boxes [BLOCK_M, BLOCK_K] of rows per token if BY_TOKEN (GATED, at most BLOCK_M tokens), else of rows in the
    order of `pairs`. weight_desc: boxes [BLOCK_N, BLOCK_K] of all experts' rows, one below the other. out: a row per
    place in `pairs` if GATED, else per pair. out_size: columns of out, a multiple of BLOCK_N. Grid: any size.

    Who is not GATED asks for its first weights before its turn: the kernel before it has waited for the routing.
    """
    halves: gl.constexpr = 2 if GATED else 1
    if USE_PDL and GATED:
        tl.extra.cuda.gdc_wait()
    num_tiles = gl.load(tiles_ptr + EXPERTS_PAD, cache_modifier=".cg") * (out_size // BLOCK_N)
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
                    weights, rows, arrived, free, out_ptr, pairs_ptr, factors_ptr, ids_ptr, ranks_ptr, tiles_ptr,
                    num_tokens, num_tiles, out_size,
                    IN_SIZE, GATED, BY_TOKEN, TOP_K, EXPERTS_PAD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
            (
                _copy,
                (
                    x_desc, weight_desc, weights, rows, arrived, free, tiles_ptr, num_tiles, out_size,
                    IN_SIZE, GATED, BY_TOKEN, EXPERTS_PAD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, USE_PDL,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _copy(
    x_desc, weight_desc, weights, rows, arrived, free, tiles_ptr, num_tiles, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BY_TOKEN: gl.constexpr, EXPERTS_PAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warp that copies."""
    blocks: gl.constexpr = (IN_SIZE + BLOCK_K - 1) // BLOCK_K
    ahead: gl.constexpr = min(STAGES, blocks)
    EARLY: gl.constexpr = USE_PDL and not GATED
    tile = gl.program_id(0)
    unit = tile * 0
    weight_row, first = _place(tiles_ptr, tile, num_tiles, out_size, GATED, BY_TOKEN, EXPERTS_PAD, BLOCK_N)
    if EARLY:
        if tile < num_tiles:
            for block in range(ahead):
                _copy_weights(
                    weight_desc, weights, arrived, block, weight_row, block * BLOCK_K, out_size,
                    GATED, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: who comes next may rely on the routing
    while tile < num_tiles:
        following = tile + gl.num_programs(0)
        next_row, next_first = _place(  # long before it is needed
            tiles_ptr, following, num_tiles, out_size, GATED, BY_TOKEN, EXPERTS_PAD, BLOCK_N
        )
        for block in range(blocks):
            stage = unit % STAGES
            mbarrier.wait(free.index(stage), (unit // STAGES - 1) & 1)  # a first round passes
            if EARLY:
                if unit >= ahead:
                    _copy_weights(
                        weight_desc, weights, arrived, stage, weight_row, block * BLOCK_K, out_size,
                        GATED, BLOCK_M, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
            else:
                _copy_weights(
                    weight_desc, weights, arrived, stage, weight_row, block * BLOCK_K, out_size,
                    GATED, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            tma.async_copy_global_to_shared(
                x_desc, [first, block * BLOCK_K], arrived.index(stage), rows.index(stage)
            )
            unit += 1
        tile, weight_row, first = following, next_row, next_first


@gluon.jit
def _place(
    tiles_ptr, tile, num_tiles, out_size,
    GATED: gl.constexpr, BY_TOKEN: gl.constexpr, EXPERTS_PAD: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """First row of weights, of all experts', and of x. Beyond the last tile: of none."""
    halves: gl.constexpr = 2 if GATED else 1
    num_blocks = out_size // BLOCK_N
    index = tile // num_blocks
    entry = tiles_ptr + EXPERTS_PAD + 1 + 3 * index
    expert = gl.load(entry, mask=tile < num_tiles, other=0, cache_modifier=".cg")
    first = tile * 0
    if not BY_TOKEN:
        first = gl.load(entry + 1, mask=tile < num_tiles, other=0, cache_modifier=".cg")
    return expert * (halves * out_size) + (tile - index * num_blocks) * BLOCK_N, first


@gluon.jit
def _copy_weights(
    weight_desc, weights, arrived, stage, row, column, out_size,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for a unit's weights; the stage has arrived when they and the unit's rows of x have."""
    halves: gl.constexpr = 2 if GATED else 1
    barrier = arrived.index(stage)
    mbarrier.expect(barrier, 2 * (halves * BLOCK_N + BLOCK_M) * BLOCK_K)
    tma.async_copy_global_to_shared(weight_desc, [row, column], barrier, weights.index(stage * halves))
    if GATED:
        tma.async_copy_global_to_shared(
            weight_desc, [out_size + row, column], barrier, weights.index(stage * halves + 1)
        )


@gluon.jit
def _multiply(
    weights, rows, arrived, free, out_ptr, pairs_ptr, factors_ptr, ids_ptr, ranks_ptr, tiles_ptr,
    num_tokens, num_tiles, out_size,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, BY_TOKEN: gl.constexpr, TOP_K: gl.constexpr,
    EXPERTS_PAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply and finish."""
    blocks: gl.constexpr = (IN_SIZE + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = _sums_layout(BLOCK_M, BLOCK_N, gl.num_warps(), 2)
    out_layout: gl.constexpr = _out_layout(BLOCK_M, BLOCK_N, gl.num_warps(), layout)
    if USE_PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    num_blocks = out_size // BLOCK_N
    tile = gl.program_id(0)
    begin = tile * 0
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(0, out_layout))
    while tile < num_tiles:
        entry = tiles_ptr + EXPERTS_PAD + 1 + 3 * (tile // num_blocks)
        first = gl.load(entry + 1, cache_modifier=".cg")
        if BY_TOKEN:
            expert = gl.load(entry, cache_modifier=".cg")
            targets = index * 0
            live = index < 0
            for place in gl.static_range(TOP_K):
                pair = index * TOP_K + place
                within = index < num_tokens
                chosen = gl.load(ids_ptr + pair, mask=within, other=-1, cache_modifier=".cg") == expert
                rank = gl.load(ranks_ptr + pair, mask=chosen, other=0, cache_modifier=".cg")
                targets = gl.where(chosen, first + rank, targets)
                live = live | chosen
        else:
            targets = first + index
            live = targets < gl.load(entry + 2, cache_modifier=".cg")
        if not GATED:
            targets = gl.load(pairs_ptr + targets, mask=live, other=0, cache_modifier=".cg")
            factors = gl.load(factors_ptr + targets, mask=live, other=0.0, cache_modifier=".cg")
        gate, up = _products(
            weights, rows, arrived, free, begin, blocks, GATED, BLOCK_M, BLOCK_N, STAGES, layout
        )
        if GATED:
            gate = gate / (1.0 + gl.exp(-gate)) * up
        out = gl.convert_layout(gate, out_layout)
        if not GATED:
            out *= factors[None, :]
        columns = tile % num_blocks * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, out_layout))
        places = out_ptr + targets.to(gl.int64)[None, :] * out_size + columns[:, None]
        gl.store(places, out.to(out_ptr.dtype.element_ty), mask=live[None, :] & (columns < out_size)[:, None])
        begin += blocks
        tile += gl.num_programs(0)


@triton.jit(do_not_specialize=["num_pairs"])
def gather_kernel(
    x_ptr, pairs_ptr, out_ptr, num_pairs,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[i] = x[token of pairs[i]]; rows behind the last pair are those of some token.

    Grid: [ceil(num_pairs / BLOCK_R), ceil(SIZE / BLOCK)].
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    within = rows < num_pairs
    pairs = tl.load(pairs_ptr + rows, mask=within, other=0, cache_modifier=".cg")
    tokens = tl.minimum(tl.maximum(pairs, 0), num_pairs - 1) // TOP_K
    mask = within[:, None] & (columns < SIZE)[None, :]
    x = tl.load(x_ptr + tokens.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=mask)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :], x, mask=mask)
