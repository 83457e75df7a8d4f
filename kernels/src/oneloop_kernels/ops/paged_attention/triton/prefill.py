"""Attention of rows with several queries on Hopper: two warpgroups compute, one warp copies for both.

A program takes items (planning.py) one key head at a time. An item's queries, BLOCK_M = 128 of tokens and heads, are
halved among the warpgroups; both read the same keys and values, which stream through a ring of RING tiles of KEYS
tokens. In a warpgroup the scores of a tile are computed while those of the tile before are multiplied with its values,
and beside that one warpgroup's exponentials fill the time in which the other one's products run. Work is dealt out in
advance, heaviest first, back and forth: no program gets much more than another.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from oneloop_kernels.ops.paged_attention.triton.planning import ITEM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.softmax import HIDDEN

BLOCK_M = tl.constexpr(128)
ROWS = tl.constexpr(64)
"""Of a warpgroup."""
KEYS = tl.constexpr(128)
"""Of a tile."""
HALF = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)


@gluon.constexpr_function
def _products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    q_desc, kv_desc, out_ptr, block_tables, table_stride, items, num_items, scale_log2,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, RING: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """One program of a fixed grid: four warps, four, and one.

    q_desc: of qkv [tokens, heads, HEAD_DIM], boxes [ROWS / group, group, HALF]; kv_desc: of the cache as rows of
    HEAD_DIM elements in the order block, head (keys' before values'), token; boxes [BOX, HALF],
    BOX = min(BLOCK_SIZE, 64).
    Items have BLOCK_M / group queries at most.
    """
    PIECES: gl.constexpr = 2 * KEYS // BOX
    boxes = gl.allocate_shared_memory(kv_desc.dtype, [RING * PIECES, BOX, HALF], kv_desc.layout)
    queries = gl.allocate_shared_memory(
        q_desc.dtype, [8, ROWS * KV_HEADS // HEADS, HEADS // KV_HEADS, HALF], q_desc.layout
    )
    arrived = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    q_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_freed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(RING):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(q_arrived.index(buffer), count=1)
        mbarrier.init(q_freed.index(buffer), count=2)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_work = gl.load(num_items) * KV_HEADS
    gl.warp_specialize(
        [
            (_compute, (
                0, boxes, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                HEADS, KV_HEADS, BLOCK_SIZE, RING,
            )),
            (_compute, (
                1, boxes, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                HEADS, KV_HEADS, BLOCK_SIZE, RING,
            )),
            (_copy, (
                q_desc, kv_desc, boxes, queries, arrived, freed, q_arrived, q_freed, block_tables, table_stride,
                items, num_work, HEADS, KV_HEADS, BLOCK_SIZE, BOX, RING,
            )),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip


@gluon.jit
def _dealt(turn):
    """The program's work of this number: forth in even rounds, back in odd ones."""
    program = gl.program_id(0)
    back = gl.num_programs(0) - 1 - program
    return turn * gl.num_programs(0) + gl.where(turn % 2 == 0, program, back)


@gluon.jit
def _copy(
    q_desc, kv_desc, boxes, queries, arrived, freed, q_arrived, q_freed, block_tables, table_stride, items, num_work,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Ask for queries and tiles in the order of their use: a tile's keys before the values of the one before."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    count = 0
    turn = 0
    work = _dealt(turn)
    while work < num_work:
        head = work % KV_HEADS
        item = items + work // KV_HEADS * ITEM_FIELDS
        first_token = gl.load(item)
        table = block_tables + gl.load(item + 2).to(gl.int64) * table_stride
        end = gl.load(item + 4)
        buffer = turn % 2
        mbarrier.wait(q_freed.index(buffer), (turn // 2 & 1) ^ 1)
        mbarrier.expect(q_arrived.index(buffer), BLOCK_M * HEAD_DIM * 2)
        for part in gl.static_range(4):  # both halves of the heads for the one warpgroup, then for the other
            tma.async_copy_global_to_shared(
                q_desc, [first_token + part // 2 * (ROWS // GROUP), head * GROUP, part % 2 * HALF],
                q_arrived.index(buffer), queries.index(4 * buffer + part),
            )  # fmt: skip
        tiles = gl.cdiv(end, KEYS)
        for index in range(tiles):
            _copy_tile(
                kv_desc,
                boxes,
                arrived,
                freed,
                table,
                index,
                end,
                head,
                count,
                KV_HEADS,
                BLOCK_SIZE,
                BOX,
                RING,
            )
            count += 1
            if index > 0:
                _copy_tile(
                    kv_desc, boxes, arrived, freed, table, index - 1, end, KV_HEADS + head, count,
                    KV_HEADS, BLOCK_SIZE, BOX, RING,
                )  # fmt: skip
                count += 1
        _copy_tile(
            kv_desc, boxes, arrived, freed, table, tiles - 1, end, KV_HEADS + head, count,
            KV_HEADS, BLOCK_SIZE, BOX, RING,
        )  # fmt: skip
        count += 1
        turn += 1
        work = _dealt(turn)


@gluon.jit
def _copy_tile(
    kv_desc, boxes, arrived, freed, table, index, end, head, count,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Ask for one head's tile, the count-th of all, when its stage is free. Boxes from `end` on read as zeros."""
    BOXES: gl.constexpr = KEYS // BOX
    stage = count % RING
    barrier = arrived.index(stage)
    blocks = ()
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        blocks = blocks + (gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(freed.index(stage), (count // RING & 1) ^ 1)
    mbarrier.expect(barrier, KEYS * HEAD_DIM * 2)
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        row = (blocks[box] * (2 * KV_HEADS) + head) * BLOCK_SIZE + position % BLOCK_SIZE
        row = gl.where(position < end, row, -BOX)
        target = stage * (2 * BOXES) + box
        tma.async_copy_global_to_shared(kv_desc, [row, 0], barrier, boxes.index(target))
        tma.async_copy_global_to_shared(kv_desc, [row, HALF], barrier, boxes.index(target + BOXES))


@gluon.jit
def _compute(
    half, boxes, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ROWS queries of each of the program's items."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    layout: gl.constexpr = _products_layout()
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    matrices = boxes._reinterpret(boxes.dtype, [RING, KEYS, HEAD_DIM], boxes.layout)
    blocks = queries._reinterpret(queries.dtype, [4, ROWS, HEAD_DIM], flat)
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    count = 0
    turn = 0
    work = _dealt(turn)
    while work < num_work:
        item = items + work // KV_HEADS * ITEM_FIELDS
        first_token = gl.load(item)
        tokens = gl.load(item + 1)
        end = gl.load(item + 4)
        position = gl.load(item + 5)
        buffer = turn % 2
        mbarrier.wait(q_arrived.index(buffer), turn // 2 & 1)
        acc, total = _attend(
            blocks.index(2 * buffer + half), matrices, arrived, freed, count, position, end, position + rows // GROUP,
            scale_log2, BLOCK_SIZE, RING, layout,
        )  # fmt: skip
        mbarrier.arrive(q_freed.index(buffer), count=1)  # behind the last tile's barrier
        count += 2 * gl.cdiv(end, KEYS)
        heads = work % KV_HEADS * GROUP + rows % GROUP
        places = ((first_token + rows // GROUP).to(gl.int64) * HEADS + heads) * HEAD_DIM
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
        result = acc * (1.0 / total)[:, None]
        gl.store(
            out_ptr + places[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty),
            mask=(rows // GROUP < tokens)[:, None],
        )  # fmt: skip
        turn += 1
        work = _dealt(turn)


@gluon.jit
def _attend(
    q, matrices, arrived, freed, count, position, end, query_positions, scale_log2,
    BLOCK_SIZE: gl.constexpr, RING: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """All tiles of an item, the first of which is the count-th of all → result [ROWS, HEAD_DIM], and sums [ROWS].

    Tiles before `clear` are seen by all queries.
    """
    tiles = gl.cdiv(end, KEYS)
    clear = gl.maximum((position + 1) // KEYS, 1)
    none = gl.zeros([ROWS, KEYS], gl.float32, layout)
    stage = count % RING
    mbarrier.wait(arrived.index(stage), count // RING & 1)
    scores = warpgroup_mma(q, matrices.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    gl.thread_barrier()
    mbarrier.arrive(freed.index(stage), count=1)
    count += 1
    maximum = gl.full([ROWS], HIDDEN, gl.float32, gl.SliceLayout(1, layout))
    weights, maximum, total, _ = _soften(scores, maximum, 0, query_positions, scale_log2, True, layout)
    weights = weights.to(q.dtype)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout)
    mbarrier.wait(arrived.index(count % RING), count // RING & 1)
    for index in range(1, clear):
        acc, weights, maximum, total = _step(
            index, acc, weights, maximum, total, q, matrices, arrived, freed, count, query_positions, scale_log2,
            False, RING, layout,
        )  # fmt: skip
        count += 2
    for index in range(clear, tiles):
        acc, weights, maximum, total = _step(
            index, acc, weights, maximum, total, q, matrices, arrived, freed, count, query_positions, scale_log2,
            True, RING, layout,
        )  # fmt: skip
        count += 2
    stage = count % RING
    if end % BLOCK_SIZE != 0:
        _clear(matrices.index(stage), end - (tiles - 1) * KEYS)
        fence_async_shared()
        gl.thread_barrier()
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))
    acc = warpgroup_mma(operand, matrices.index(stage), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    gl.thread_barrier()
    mbarrier.arrive(freed.index(stage), count=1)
    return acc, total


@gluon.jit
def _step(
    index, acc, weights, maximum, total, q, matrices, arrived, freed, count, query_positions, scale_log2,
    MASKED: gl.constexpr, RING: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scores of the index-th tile, which has arrived; then their exponentials, while the weights of the tile before are
    multiplied with its values. At the end the next tile in the ring has arrived.
    """
    none = gl.zeros([ROWS, KEYS], gl.float32, layout)
    k_stage = count % RING
    v_stage = (count + 1) % RING
    scores = warpgroup_mma(q, matrices.index(k_stage).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(arrived.index(v_stage), (count + 1) // RING & 1)
    operand = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))
    acc = warpgroup_mma(operand, matrices.index(v_stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    powers, maximum, sums, shrink = _soften(
        scores, maximum, index, query_positions, scale_log2, MASKED, layout
    )
    total = total * shrink + sums
    # This wait, a loop, keeps the assembler from moving the next one up: it would make exponentials wait for products.
    mbarrier.wait(arrived.index((count + 2) % RING), (count + 2) // RING & 1)
    acc, operand, total = warpgroup_mma_wait(0, deps=[acc, operand, total])
    acc = acc * shrink[:, None]
    gl.thread_barrier()  # every warp has read both stages
    mbarrier.arrive(freed.index(k_stage), count=1)
    mbarrier.arrive(freed.index(v_stage), count=1)
    return acc, powers.to(weights.dtype), maximum, total


@gluon.jit
def _soften(
    scores, maximum, index, query_positions, scale_log2, MASKED: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """One step of the online softmax → powers, new maxima (base 2), the powers' sums, factor on what came before."""
    if MASKED:
        keys = index * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        scores = gl.where(keys[None, :] <= query_positions[:, None], scores, HIDDEN)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    powers = gl.exp2(scores * scale_log2 - new_maximum[:, None])
    return powers, new_maximum, gl.sum(powers, 1), gl.exp2(maximum - new_maximum)


@gluon.jit
def _clear(values, length):
    """Zeros for the values from `length` on: nobody has written them, and zero times infinity would be felt.

    Both warpgroups do so, with equal bytes.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    values.store(gl.where((rows < length)[:, None], values.load(layout), 0.0).to(values.dtype))
