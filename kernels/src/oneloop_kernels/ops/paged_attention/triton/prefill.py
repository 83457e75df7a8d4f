"""Attention of rows with several queries on Hopper: two warpgroups compute, one warp copies for both.

A program takes items (planning.py) one key head at a time. An item's queries, BLOCK_M = 128 of tokens and heads, are
halved among the warpgroups; both read the same keys and values, which stream through a ring of RING tiles of KEYS
tokens. In a warpgroup the scores of a tile are computed while those of the tile before are multiplied with its values,
and beside that one warpgroup's exponentials fill the time in which the other one's products run. Work is dealt out in
advance, heaviest first, back and forth: no program gets much more than another.

A cache of 8 bits (NARROW) is copied into a ring of its own, NARROW_RING tiles of half the size; a third warpgroup makes
float16 of them, which the ring of the others holds then. Queries and weights are float16 too.
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

from oneloop_kernels.ops.paged_attention.triton.narrow import float16_or_nan
from oneloop_kernels.ops.paged_attention.triton.planning import ITEM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.softmax import HIDDEN

BLOCK_M = tl.constexpr(128)
ROWS = tl.constexpr(64)
"""Of a warpgroup."""
KEYS = tl.constexpr(128)
"""Of a tile."""
HALF = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)
PIECE = tl.constexpr(32)
"""Rows that are widened at a time: as many as fit the registers that are left."""


@gluon.constexpr_function
def _is_narrow(dtype):
    return dtype.primitive_bitwidth == 8


@gluon.constexpr_function
def _matrix_layout():
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.constexpr_function
def _rows_layout():
    """No bank twice, neither for numbers of 8 bits nor for those of 16."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    q_desc, kv_desc, out_ptr, block_tables, table_stride, items, num_items, scale_log2, value_scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, RING: gl.constexpr,
    NARROW_RING: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One program of a fixed grid: four warps, four, and one; of a cache of 8 bits four more.

    q_desc: of qkv [tokens, heads, HEAD_DIM], boxes [ROWS / group, group, HALF]; kv_desc: of the cache as rows of
    HEAD_DIM elements in the order block, head (keys' before values'), token; boxes of BOX = min(BLOCK_SIZE, 64) rows
    and 128 bytes. Items have BLOCK_M / group queries at most. NARROW_RING: 0 where the cache has 16 bits.
    """
    NARROW: gl.constexpr = _is_narrow(kv_desc.dtype)
    COPIED: gl.constexpr = NARROW_RING if NARROW else RING
    PARTS: gl.constexpr = 1 if NARROW else 2
    boxes = gl.allocate_shared_memory(
        kv_desc.dtype, [COPIED * PARTS * (KEYS // BOX), BOX, HEAD_DIM // PARTS], kv_desc.layout
    )
    if NARROW:
        matrices = gl.allocate_shared_memory(gl.float16, [RING, KEYS, HEAD_DIM], _matrix_layout())
    else:
        matrices = boxes._reinterpret(boxes.dtype, [RING, KEYS, HEAD_DIM], boxes.layout)
    queries = gl.allocate_shared_memory(
        q_desc.dtype, [8, ROWS * KV_HEADS // HEADS, HEADS // KV_HEADS, HALF], q_desc.layout
    )
    arrived, freed = _barriers(RING, 2)
    q_arrived, q_freed = _barriers(2, 2)
    if NARROW:
        copied, widened = _barriers(NARROW_RING, 1)
    else:
        copied, widened = arrived, freed
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_work = gl.load(num_items) * KV_HEADS
    if NARROW:
        gl.warp_specialize(
            [
                (_compute, (
                    0, matrices, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                    value_scale, HEADS, KV_HEADS, BLOCK_SIZE, RING, NARROW,
                )),
                (_compute, (
                    1, matrices, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                    value_scale, HEADS, KV_HEADS, BLOCK_SIZE, RING, NARROW,
                )),
                (_widen, (
                    boxes, matrices, copied, widened, arrived, freed, items, num_work, KV_HEADS, RING, NARROW_RING,
                )),
                (_copy, (
                    q_desc, kv_desc, boxes, queries, copied, widened, q_arrived, q_freed, block_tables, table_stride,
                    items, num_work, HEADS, KV_HEADS, BLOCK_SIZE, BOX, NARROW_RING,
                )),
            ],
            [4, 4, 1],
            [208, 64, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    0, matrices, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                    value_scale, HEADS, KV_HEADS, BLOCK_SIZE, RING, NARROW,
                )),
                (_compute, (
                    1, matrices, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2,
                    value_scale, HEADS, KV_HEADS, BLOCK_SIZE, RING, NARROW,
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
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Of a ring: that a stage has been filled, by one; and that it has been read, by so many."""
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(read.index(stage), count=READERS)
    return filled, read


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
    NARROW: gl.constexpr = _is_narrow(kv_desc.dtype)
    stage = count % RING
    barrier = arrived.index(stage)
    blocks = ()
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        blocks = blocks + (gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(freed.index(stage), (count // RING & 1) ^ 1)
    mbarrier.expect(barrier, KEYS * HEAD_DIM * (1 if NARROW else 2))
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        row = (blocks[box] * (2 * KV_HEADS) + head) * BLOCK_SIZE + position % BLOCK_SIZE
        row = gl.where(position < end, row, -BOX)
        if NARROW:
            tma.async_copy_global_to_shared(kv_desc, [row, 0], barrier, boxes.index(stage * BOXES + box))
        else:
            target = stage * (2 * BOXES) + box
            tma.async_copy_global_to_shared(kv_desc, [row, 0], barrier, boxes.index(target))
            tma.async_copy_global_to_shared(kv_desc, [row, HALF], barrier, boxes.index(target + BOXES))


@gluon.jit
def _widen(
    boxes, matrices, copied, widened, arrived, freed, items, num_work,
    KV_HEADS: gl.constexpr, RING: gl.constexpr, NARROW_RING: gl.constexpr,
):  # fmt: skip
    """A warpgroup between the rings: tiles of 8 bits, in the order in which they were asked for, into float16."""
    narrow = boxes._reinterpret(boxes.dtype, [NARROW_RING, KEYS, HEAD_DIM], boxes.layout)
    count = 0
    turn = 0
    work = _dealt(turn)
    while work < num_work:
        end = gl.load(items + work // KV_HEADS * ITEM_FIELDS + 4)
        tiles = 2 * gl.cdiv(end, KEYS)
        for index in range(tiles):
            stage = count % RING
            source = count % NARROW_RING
            there = gl.where(index == tiles - 1, end - (tiles // 2 - 1) * KEYS, KEYS)
            mbarrier.wait(copied.index(source), count // NARROW_RING & 1)
            mbarrier.wait(freed.index(stage), (count // RING & 1) ^ 1)
            if there < KEYS:
                _widen_tile(narrow.index(source), matrices.index(stage), there, True)
            else:
                _widen_tile(narrow.index(source), matrices.index(stage), there, False)
            fence_async_shared()
            gl.thread_barrier()  # every warp has read and written its part
            mbarrier.arrive(arrived.index(stage), count=1)
            mbarrier.arrive(widened.index(source), count=1)
            count += 1
        turn += 1
        work = _dealt(turn)


@gluon.jit
def _widen_tile(narrow, wide, there, MASKED: gl.constexpr):
    """MASKED: zeros for the values from `there` on; nobody has written them, and zero times infinity would be felt."""
    layout: gl.constexpr = _rows_layout()
    for piece in gl.static_range(KEYS // PIECE):
        values = narrow.slice(piece * PIECE, PIECE).load(layout).to(gl.float16)
        if MASKED:
            rows = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
            values = gl.where((rows < there)[:, None], values, 0.0).to(gl.float16)
        wide.slice(piece * PIECE, PIECE).store(values)


@gluon.jit
def _compute(
    half, matrices, queries, arrived, freed, q_arrived, q_freed, out_ptr, items, num_work, scale_log2, value_scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, RING: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """One warpgroup: ROWS queries of each of the program's items."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    layout: gl.constexpr = _products_layout()
    copied = queries._reinterpret(queries.dtype, [4, ROWS, HEAD_DIM], _matrix_layout())
    blocks = copied._reinterpret(matrices.dtype, [4, ROWS, HEAD_DIM], _matrix_layout())
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
        if copied.dtype != blocks.dtype:
            _convert(copied.index(2 * buffer + half), blocks.index(2 * buffer + half))
            fence_async_shared()
            gl.thread_barrier()
        acc, total = _attend(
            blocks.index(2 * buffer + half), matrices, arrived, freed, count, position, end, position + rows // GROUP,
            scale_log2, BLOCK_SIZE, RING, NARROW, layout,
        )  # fmt: skip
        mbarrier.arrive(q_freed.index(buffer), count=1)  # behind the last tile's barrier
        count += 2 * gl.cdiv(end, KEYS)
        heads = work % KV_HEADS * GROUP + rows % GROUP
        places = ((first_token + rows // GROUP).to(gl.int64) * HEADS + heads) * HEAD_DIM
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
        result = acc * (value_scale / total)[:, None]
        gl.store(
            out_ptr + places[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty),
            mask=(rows // GROUP < tokens)[:, None],
        )  # fmt: skip
        turn += 1
        work = _dealt(turn)


@gluon.jit
def _attend(
    q, matrices, arrived, freed, count, position, end, query_positions, scale_log2,
    BLOCK_SIZE: gl.constexpr, RING: gl.constexpr, NARROW: gl.constexpr, layout: gl.constexpr,
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
    if not NARROW:
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
def _convert(queries, wide):
    """Queries into float16, in their own place; what is beyond its numbers becomes the largest."""
    values = queries.load(_rows_layout()).to(gl.float32)
    wide.store(float16_or_nan(values))


@gluon.jit
def _clear(values, length):
    """Zeros for the values from `length` on: nobody has written them, and zero times infinity would be felt.

    Both warpgroups do so, with equal bytes.
    """
    layout: gl.constexpr = _rows_layout()
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    values.store(gl.where((rows < length)[:, None], values.load(layout), 0.0).to(values.dtype))
