"""As `packed` on Hopper: numbers are unpacked to the registers that the tensor cores multiply from.

Tiles of weights and of x are copied ahead, some stages deep, by the same warps that unpack (`packed_linear`'s way,
`registers`) and multiply: of up to 16 pairs by a warp's instructions, of more by four warps'. Where a group is a whole
tile and pairs are few, sums are scaled in the place of numbers, as `packed_linear.triton.stream` does.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.moe.triton.grouped import fetch
from oneloop_kernels.ops.moe.triton.routing import TABLE
from oneloop_kernels.ops.packed_linear.triton.registers import (
    TILE_COLUMNS,
    TILE_ROWS,
    raw_numbers,
    scaled_weights,
)
from oneloop_kernels.ops.packed_linear.triton.stream import FEW_ROWS, _add_scaled, _layout_of, _sums_of

TILE_WORDS = gl.constexpr(1024)


@gluon.constexpr_function
def _copies(elements):
    """Of one dimension: 16 bytes to a thread."""
    return gl.BlockedLayout([elements], [32], [4], [0])


@gluon.constexpr_function
def _flat():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def _rows_layout():
    """Of [BLOCK_M, 128]: 16 bytes to a thread."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _out_layout(block_m):
    """Of [64, BLOCK_M]: eight results of a row, 16 bytes, to a thread."""
    return gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])


@gluon.jit(do_not_specialize=["num_tokens"])
def packed_hopper_kernel(
    x_ptr, words_ptr, high_ptr, params_ptr, out_ptr, ids_ptr, factors_ptr, bins_ptr, tiles_ptr,
    out_size, x_stride, num_tokens,
    IN_SIZE: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, FEW: gl.constexpr, BY_PAIR: gl.constexpr,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """As `packed_experts_kernel`, without an order of columns or the sum over experts. params: int32.

    IN_SIZE: a multiple of 128. ON_SUMS: scaled as sums; of 4 bits, GROUPS 1 and BLOCK_M ≤ 16. Four warps. What is not
    GATED follows who has waited for the routing itself: it asks for weights before its turn has come.
    """
    halves: gl.constexpr = 2 if GATED else 1
    AHEAD: gl.constexpr = STAGES - 1 if BLOCK_M <= FEW_ROWS else STAGES - 2
    COUNT: gl.constexpr = IN_SIZE // TILE_COLUMNS
    words = gl.allocate_shared_memory(gl.int32, [STAGES * halves, TILE_WORDS], _flat())
    high = words
    if BITS > 4:
        high = gl.allocate_shared_memory(high_ptr.dtype.element_ty, [STAGES * halves, TILE_WORDS], _flat())
    num_params: gl.constexpr = 32 * GROUPS * (1 if SHIFT == "none" else 2)
    params = gl.allocate_shared_memory(gl.int32, [STAGES * halves, num_params], _flat())
    kind: gl.constexpr = x_ptr.dtype.element_ty
    rows_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, TILE_COLUMNS], kind)
    rows = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, TILE_COLUMNS], rows_shared)

    if USE_PDL and GATED:
        tl.extra.cuda.gdc_wait()
    num_blocks = gl.cdiv(out_size, TILE_ROWS)
    tile, block = gl.program_id(0) // num_blocks, gl.program_id(0) % num_blocks
    row_index: gl.constexpr = gl.SliceLayout(1, _rows_layout())
    is_tile, expert, pairs, own, live = _pairs_of(
        tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens, TOP_K, FEW, BY_PAIR, BLOCK_M, row_index
    )
    if USE_PDL and GATED:
        tl.extra.cuda.gdc_launch_dependents()
    first = (expert.to(gl.int64) * halves * num_blocks + block) * COUNT
    up = num_blocks.to(gl.int64) * COUNT
    if is_tile:
        for stage in gl.static_range(AHEAD):
            if stage < COUNT:
                _copy_weights(
                    words_ptr, high_ptr, params_ptr, words, high, params, stage, first + stage, up,
                    halves, BITS, num_params,
                )  # fmt: skip
    if USE_PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_tile:
        sources = own
        if GATED:
            sources = pairs // TOP_K
        columns = gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, _rows_layout()))
        x_rows = x_ptr + sources.to(gl.int64)[:, None] * x_stride + columns[None, :]
        for stage in gl.static_range(AHEAD):
            if stage < COUNT:
                async_copy.async_copy_global_to_shared(
                    rows.index(stage), x_rows + stage * TILE_COLUMNS, mask=live[:, None]
                )
            async_copy.commit_group()
        sums = _products(
            x_rows, live, words_ptr, high_ptr, params_ptr, words, high, params, rows, first, up,
            COUNT, GATED, BITS, SHIFT, GROUPS, ON_SUMS, num_params, BLOCK_M, STAGES, AHEAD,
        )  # fmt: skip
        _write(
            sums, out_ptr, factors_ptr, tile, block, ids_ptr, bins_ptr, tiles_ptr, out_size, num_tokens,
            TOP_K, GATED, FEW, BY_PAIR, BLOCK_M,
        )  # fmt: skip


@gluon.jit
def _pairs_of(
    tile, ids_ptr, bins_ptr, tiles_ptr, num_tokens,
    TOP_K: gl.constexpr, FEW: gl.constexpr, BY_PAIR: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Whether there is such a tile, its expert; its pairs, rows between the products, and which of them are live."""
    index = gl.arange(0, BLOCK_M, layout)
    if FEW:
        expert = tile
        if BY_PAIR:
            expert = fetch(ids_ptr + tile)
        place = gl.full([BLOCK_M], -1, gl.int32, layout)
        for choice in gl.static_range(TOP_K):
            mine = gl.load(
                ids_ptr + index * TOP_K + choice, mask=index < num_tokens, other=-1, cache_modifier=".cg"
            )
            place = gl.where(mine == expert, choice, place)
        live = (place >= 0) & (index < num_tokens)
        pairs = index * TOP_K + gl.maximum(place, 0)
        own = pairs
        first = gl.min(gl.where(live, index, BLOCK_M), 0)
        is_tile = first < BLOCK_M
        if BY_PAIR:
            is_tile = (expert >= 0) & (first == tile // TOP_K)
        expert = gl.maximum(expert, 0)
    else:
        place_ptr = tiles_ptr + TABLE + 4 * tile  # at once, though it may be beyond the last
        is_tile = tile < fetch(tiles_ptr)
        expert = fetch(place_ptr)
        begin = fetch(place_ptr + 1)
        live = index < gl.where(is_tile, fetch(place_ptr + 2) - begin, 0)
        bin_ptr = bins_ptr + gl.where(is_tile, fetch(place_ptr + 3), 0)
        pairs = gl.load(bin_ptr + index, mask=live, other=0, cache_modifier=".cg")
        own = begin + index
    return is_tile, expert, pairs, own, live


@gluon.jit
def _copy_weights(
    words_ptr, high_ptr, params_ptr, words, high, params, stage, tile, up,
    HALVES: gl.constexpr, BITS: gl.constexpr, NUM_PARAMS: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of weights, and of two halves the other one's, `up` tiles on."""
    for half in gl.static_range(HALVES):
        place = stage * HALVES + half
        here = tile + half * up
        numbers = gl.arange(0, TILE_WORDS, _copies(4))
        async_copy.async_copy_global_to_shared(words.index(place), words_ptr + here * TILE_WORDS + numbers)
        if BITS == 8:
            async_copy.async_copy_global_to_shared(high.index(place), high_ptr + here * TILE_WORDS + numbers)
        if BITS == 6:
            pairs = gl.arange(0, TILE_WORDS, _copies(8))
            async_copy.async_copy_global_to_shared(high.index(place), high_ptr + here * TILE_WORDS + pairs)
        scales = gl.arange(0, NUM_PARAMS, _copies(4))
        async_copy.async_copy_global_to_shared(params.index(place), params_ptr + here * NUM_PARAMS + scales)


@gluon.jit
def _products(
    x_rows, live, words_ptr, high_ptr, params_ptr, words, high, params, rows, first, up,
    COUNT: gl.constexpr, GATED: gl.constexpr, BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr,
    ON_SUMS: gl.constexpr, NUM_PARAMS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """float32 [64, BLOCK_M], with the activation if GATED. AHEAD stages have been asked for."""
    halves: gl.constexpr = 2 if GATED else 1
    layout: gl.constexpr = _layout_of(BLOCK_M, gl.num_warps())
    gate = gl.zeros([TILE_ROWS, BLOCK_M], gl.float32, layout)
    up_sums = gate
    for step in range(COUNT):
        async_copy.wait_group(AHEAD - 1)
        if BLOCK_M > FEW_ROWS:
            fence_async_shared()  # what was copied was not written by the copy engine
        gl.thread_barrier()  # what all threads asked for is there, and nobody reads the stage that is filled next
        ahead = step + AHEAD
        if ahead < COUNT:
            _copy_weights(
                words_ptr, high_ptr, params_ptr, words, high, params, ahead % STAGES, first + ahead, up,
                halves, BITS, NUM_PARAMS,
            )  # fmt: skip
            async_copy.async_copy_global_to_shared(
                rows.index(ahead % STAGES), x_rows + ahead * TILE_COLUMNS, mask=live[:, None]
            )
        async_copy.commit_group()
        place = step % STAGES * halves
        x = rows.index(step % STAGES).permute((1, 0))
        if BLOCK_M > FEW_ROWS:
            # The tensor cores read the registers of their operand until they have been waited for, which therefore
            # stands in the same turn of the loop: beyond it the same registers have the next numbers.
            weights = scaled_weights(
                words, high, params, place, 0, BITS, SHIFT, GROUPS, 1, rows.dtype, layout
            )
            under_way = warpgroup_mma(weights, x, gate, is_async=True)
            if GATED:
                up_weights = scaled_weights(
                    words, high, params, place + 1, 0, BITS, SHIFT, GROUPS, 1, rows.dtype, layout
                )
                gate, _ = warpgroup_mma_wait(0, deps=[under_way, weights])
                up_under_way = warpgroup_mma(up_weights, x, up_sums, is_async=True)
                up_sums, _ = warpgroup_mma_wait(0, deps=[up_under_way, up_weights])
            else:
                gate, _ = warpgroup_mma_wait(0, deps=[under_way, weights])
        else:
            loaded = x.load(gl.DotOperandLayout(1, layout, 2))
            ones = gate
            if ON_SUMS and SHIFT == "offset":
                ones = _sums_of(loaded, BLOCK_M, layout)
            gate = _add(gate, loaded, ones, words, high, params, place, BITS, SHIFT, GROUPS, ON_SUMS, layout)
            if GATED:
                up_sums = _add(
                    up_sums, loaded, ones, words, high, params, place + 1,
                    BITS, SHIFT, GROUPS, ON_SUMS, layout,
                )  # fmt: skip
    async_copy.wait_group(0)
    if GATED:
        gate = gate / (1.0 + gl.exp(-gate)) * up_sums
    return gate


@gluon.jit
def _add(
    total, x, ones, words, high, params, place,
    BITS: gl.constexpr, SHIFT: gl.constexpr, GROUPS: gl.constexpr, ON_SUMS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """total and the product of a stage's tile with few rows."""
    if ON_SUMS:
        numbers = raw_numbers(words, params, place, 0, SHIFT, 1, x.dtype, layout)
        total = _add_scaled(total, numbers, x, ones, params, place, 0, SHIFT, 1, layout)
    else:
        weights = scaled_weights(words, high, params, place, 0, BITS, SHIFT, GROUPS, 1, x.dtype, layout)
        total = mma_v2(weights, x, total)
    return total


@gluon.jit
def _write(
    sums, out_ptr, factors_ptr, tile, block, ids_ptr, bins_ptr, tiles_ptr, out_size, num_tokens,
    TOP_K: gl.constexpr, GATED: gl.constexpr, FEW: gl.constexpr, BY_PAIR: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Between the products by rows; behind them by pairs, times their factors."""
    layout: gl.constexpr = _out_layout(BLOCK_M)
    _, _, pairs, own, live = _pairs_of(
        tile,
        ids_ptr,
        bins_ptr,
        tiles_ptr,
        num_tokens,
        TOP_K,
        FEW,
        BY_PAIR,
        BLOCK_M,
        gl.SliceLayout(0, layout),
    )
    out = gl.convert_layout(sums, layout)
    targets = own
    if not GATED:
        factors = gl.load(factors_ptr + pairs, mask=live, other=0.0, cache_modifier=".cg")
        out *= factors[None, :]
        targets = pairs
    columns = block * TILE_ROWS + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
    places = out_ptr + targets.to(gl.int64)[None, :] * out_size + columns[:, None]
    mask = (columns < out_size)[:, None] & live[None, :]
    gl.store(places, out.to(out_ptr.dtype.element_ty), mask=mask)
