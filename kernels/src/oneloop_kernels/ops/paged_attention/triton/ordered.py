"""Attention in the fixed order (oneloop_kernels.order) on Hopper: equal bits for a query, however it is computed.

The keys of a sequence are cut into splits of SPLIT, counted from its beginning. Within a split tiles of KEYS keys
follow one another in an online softmax; the splits' results are joined in ascending order. Both kernels do it by the
same functions: `decode_kernel` for rows with one query, whose splits several programs may share (they leave the result
of each split, and who comes last joins them in order), and `blocks_kernel` for blocks of queries of rows with several,
of which one program computes all splits.

Keys are the rows of the matrix products, so that sums over keys take the same way through lanes and warps whatever the
number of queries. Keys that a query does not see change no bit: their weights are zeros, and a tile or split without
any key in sight is multiplied by one and by zero.

Multiplications that feed additions are written as `fma`, so that no compiler chooses.
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

from oneloop_kernels.ops.paged_attention.triton.planning import ITEM_FIELDS, PROGRAM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.prefill import _dealt
from oneloop_kernels.ops.paged_attention.triton.softmax import HIDDEN
from oneloop_kernels.ops.paged_attention.triton.stream import (
    HALF,
    HEAD_DIM,
    KEYS,
    _advance,
    _clear,
    _copy_pair,
    _copy_tile,
    _products_layout,
    _program_of,
)

SPLIT = gl.constexpr(256)
"""Keys of a split: part of the fixed order, never tuned per card or load."""
SPLIT_TILES = gl.constexpr(4)


@gluon.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_desc, kv_desc, out_ptr,
    row_slot, seq_lens, block_tables, table_stride, programs, split,
    partial_acc, partial_norm, tickets, max_parts, scale_log2,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    STAGES: gl.constexpr, BESIDE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """One program of a fixed grid, four warps and one; as stream.stream_kernel, whose plan it takes, but for the unit.

    The plan numbers tiles of split[2] keys, here units: splits, or whole contexts where there are more splits than
    max_parts.
    fp32: partial_acc [max_parts, group, HEAD_DIM], partial_norm [2, max_parts, group]: results of the splits of those
    contexts that are cut, by the number of the split in the step.
    """
    BOXES: gl.constexpr = KEYS // BOX
    boxes = gl.allocate_shared_memory(kv_desc.dtype, [STAGES * 4 * BOXES, BOX, HALF], kv_desc.layout)
    queries = gl.allocate_shared_memory(q_desc.dtype, [2 * (STAGES + 1), QUERIES, HALF], q_desc.layout)
    weights = gl.allocate_shared_memory(q_desc.dtype, [QUERIES, KEYS], q_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=1)
    if USE_PDL and not BESIDE:
        tl.extra.cuda.gdc_launch_dependents()
    program = gl.program_id(0)
    base = gl.load(split)
    extra = gl.load(split + 1)
    unit = gl.load(split + 2)
    first = program * base + gl.minimum(program, extra)
    left = base + (program < extra).to(gl.int32)
    record = programs + program * PROGRAM_FIELDS
    row = gl.load(record)
    place = gl.load(record + 1)
    pairs = gl.load(record + 2)
    length = gl.load(record + 3)
    slot = gl.load(record + 4)
    gl.warp_specialize(
        [
            (_compute_pairs, (
                boxes, queries, weights, arrived, freed, out_ptr, seq_lens, partial_acc, partial_norm, tickets,
                max_parts, scale_log2, row, place, pairs, length, left, first, base, extra, unit,
                HEADS, KV_HEADS, QUERIES, STAGES,
            )),
            (_copy_pairs, (
                q_desc, kv_desc, boxes, queries, arrived, freed, row_slot, seq_lens, block_tables, table_stride,
                row, place, pairs, length, slot, left, unit,
                HEADS, KV_HEADS, BLOCK_SIZE, BOX, QUERIES, STAGES, BESIDE, USE_PDL,
            )),
        ],
        [1],
        [56],
    )  # fmt: skip


@gluon.jit
def _copy_pairs(
    q_desc, kv_desc, boxes, queries, arrived, freed, row_slot, seq_lens, block_tables, table_stride,
    row, place, pairs, length, slot, left, unit,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    STAGES: gl.constexpr, BESIDE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Ask for the range's tiles; as stream._copy."""
    count = 0
    for pair in range(pairs):
        units = gl.cdiv(length, unit)
        head = place // units
        done = gl.minimum(units - place % units, left)
        tiles = gl.cdiv(length, KEYS)
        begin = place % units * (unit // KEYS)
        end = gl.minimum(tiles, begin + done * (unit // KEYS))
        table = block_tables + slot.to(gl.int64) * table_stride
        query = row * (HEADS + 2 * KV_HEADS) + head * (HEADS // KV_HEADS)
        count = _copy_pair(
            q_desc, kv_desc, boxes, queries, arrived, freed, table, query, pair, begin, end, tiles, length, head, count,
            KV_HEADS, BLOCK_SIZE, BOX, 1, QUERIES, STAGES, BESIDE, USE_PDL,
        )  # fmt: skip
        row, place, left, row_ends = _advance(row, place, left, done, units, KV_HEADS)
        more = row_ends & (left > 0)
        length = gl.load(seq_lens + row, mask=more, other=length)
        slot = gl.load(row_slot + row, mask=more, other=slot)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # also without any work: who waits for this kernel waits for those before it


@gluon.jit
def _compute_pairs(
    boxes, queries, weights, arrived, freed, out_ptr, seq_lens, partial_acc, partial_norm, tickets,
    max_parts, scale_log2, row, place, pairs, length, left, first, base, extra, unit,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend to the range's tiles as they arrive; write the pairs that are whole, leave the splits of what is not."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    layout: gl.constexpr = _products_layout(QUERIES)
    matrices = boxes._reinterpret(boxes.dtype, [STAGES * 2, KEYS, HEAD_DIM], boxes.layout)
    heads = queries._reinterpret(queries.dtype, [STAGES + 1, QUERIES, HEAD_DIM], queries.layout)
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    places = group[None, :] * HEAD_DIM + dims[:, None]
    number = first
    count = 0
    for pair in range(pairs):
        units = gl.cdiv(length, unit)
        head = place // units
        done = gl.minimum(units - place % units, left)
        begin = place % units * (unit // KEYS)
        end = gl.minimum(gl.cdiv(length, KEYS), begin + done * (unit // KEYS))
        whole = done == units
        acc, maximum, total = _nothing(QUERIES, layout)
        own = number
        for start in range(begin, end, SPLIT_TILES):
            stop = gl.minimum(end, start + SPLIT_TILES)
            part, part_maximum, part_total = _attend(
                start, stop, count, length, length + group * 0, heads.index(pair % (STAGES + 1)), matrices, weights,
                arrived, freed, scale_log2, QUERIES, STAGES, layout,
            )  # fmt: skip
            if not whole:
                _leave(
                    part,
                    part_maximum,
                    part_total,
                    own,
                    places,
                    group,
                    partial_acc,
                    partial_norm,
                    max_parts,
                    GROUP,
                )
            acc, maximum, total = _join(acc, maximum, total, part, part_maximum, part_total)
            own += 1
            count += stop - start
        if not whole:
            whole, acc, total = _settle(
                acc, total, number - place % units, units, base, extra, places, group,
                partial_acc, partial_norm, tickets, max_parts, GROUP, QUERIES, layout,
            )  # fmt: skip
        if whole:
            result = _normalised(acc, total, group < GROUP)
            target = out_ptr + (row.to(gl.int64) * HEADS + head * GROUP) * HEAD_DIM + places
            gl.store(target, result.to(out_ptr.dtype.element_ty), mask=(group < GROUP)[None, :])
        number += done
        row, place, left, row_ends = _advance(row, place, left, done, units, KV_HEADS)
        length = gl.load(seq_lens + row, mask=row_ends & (left > 0), other=length)


@gluon.jit
def _nothing(QUERIES: gl.constexpr, layout: gl.constexpr):
    """What has seen no key: result, maxima, sums."""
    acc = gl.zeros([HEAD_DIM, QUERIES], gl.float32, layout)
    maximum = gl.full([QUERIES], HIDDEN, gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, layout))
    return acc, maximum, total


@gluon.jit
def _attend(
    begin, end, count, length, limits, queries, matrices, weights, arrived, freed, scale_log2,
    QUERIES: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The tiles begin … end − 1 of a split, the first of which is the program's count-th.

    length: keys from there on are nobody's. limits: [QUERIES] keys from there on are not seen.
    → the result [HEAD_DIM, QUERIES], not normalised; maxima (base 2) and sums [QUERIES].
    """
    acc, maximum, _ = _nothing(QUERIES, layout)
    sums = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    none = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    inside = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    for index in range(begin, end):
        stage = count % STAGES
        mbarrier.wait(arrived.index(stage), count // STAGES & 1)
        keys, values = matrices.index(2 * stage), matrices.index(2 * stage + 1)
        scores = warpgroup_mma(keys, queries.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        seen = inside[:, None] < (limits - index * KEYS)[None, :]
        scores = gl.where(seen, scores, HIDDEN)
        new_maximum = gl.maximum(maximum, gl.max(scores, 0) * scale_log2)
        powers = gl.exp2(gl.fma(scores, scale_log2, -new_maximum[None, :]))
        powers = gl.where(seen, powers, 0.0)
        shrink = gl.exp2(maximum - new_maximum)[None, :]
        maximum = new_maximum
        sums = gl.fma(sums, shrink, powers)
        acc = acc * shrink
        weights.permute((1, 0)).store(powers.to(weights.dtype))
        if length - index * KEYS < KEYS:
            _clear(values, length - index * KEYS)
        fence_async_shared()
        gl.thread_barrier()  # every warp's weights are there
        acc = warpgroup_mma(values.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()  # every warp has read the stage
        mbarrier.arrive(freed.index(stage), count=1)
        count += 1
    return acc, maximum, gl.sum(sums, 0)


@gluon.jit
def _join(acc, maximum, total, part, part_maximum, part_total):
    """What has been joined so far, and the next split's result → the new three."""
    new_maximum = gl.maximum(maximum, part_maximum)
    shrink = gl.exp2(maximum - new_maximum)
    weight = gl.exp2(part_maximum - new_maximum)
    total = gl.fma(total, shrink, part_total * weight)
    acc = gl.fma(acc, shrink[None, :], part * weight[None, :])
    return acc, new_maximum, total


@gluon.jit
def _normalised(acc, total, mine):
    """acc / total where `mine`."""
    factor = 1.0 / gl.where(mine, total, 1.0)
    return acc * factor[None, :]


@gluon.jit
def _leave(
    part, maximum, total, number, places, group, partial_acc, partial_norm, max_parts, GROUP: gl.constexpr
):  # fmt: skip
    """Store the result of the split of that number."""
    mine = group < GROUP
    gl.store(partial_acc + number.to(gl.int64) * (GROUP * HEAD_DIM) + places, part, mask=mine[None, :])
    gl.store(partial_norm + number * GROUP + group, maximum, mask=mine)
    gl.store(partial_norm + (max_parts + number) * GROUP + group, total, mask=mine)


@gluon.jit
def _settle(
    acc, total, pair_start, units, base, extra, places, group, partial_acc, partial_norm, tickets, max_parts,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Say that one's splits of a pair are left; if it is the last to come, whole is true, and acc and total are the
    pair's. pair_start: number of the pair's first split, of so many. Loads go past the first-level cache.
    """
    first = _program_of(pair_start, base, extra)
    last = _program_of(pair_start + units - 1, base, extra)
    gl.thread_barrier()  # all of it is written before the ticket is taken
    ticket = gl.atomic_add(tickets + first, 1, sem="acq_rel", scope="gpu")
    whole = ticket == last - first
    if whole:
        gl.store(tickets + first, 0)
        mine = group < GROUP
        acc, maximum, total = _nothing(QUERIES, layout)
        for number in range(pair_start, pair_start + units):
            norm = partial_norm + number * GROUP + group
            part_maximum = gl.load(norm, mask=mine, other=HIDDEN, cache_modifier=".cg")
            part_total = gl.load(norm + max_parts * GROUP, mask=mine, other=0.0, cache_modifier=".cg")
            source = partial_acc + gl.cast(number, gl.int64) * (GROUP * HEAD_DIM) + places
            part = gl.load(source, mask=mine[None, :], other=0.0, cache_modifier=".cg")
            acc, maximum, total = _join(acc, maximum, total, part, part_maximum, part_total)
    return whole, acc, total


@gluon.jit(do_not_specialize=["table_stride"])
def blocks_kernel(
    q_desc, kv_desc, out_ptr, block_tables, table_stride, items, num_items, scale_log2,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Rows with several queries. One program of a fixed grid, four warps and one.

    q_desc: of qkv [tokens, heads, HEAD_DIM], boxes [QUERIES / group, group, HALF]; kv_desc: as in decode_kernel.
    Items (planning.py) have QUERIES / group queries at most.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    BOXES: gl.constexpr = KEYS // BOX
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    boxes = gl.allocate_shared_memory(kv_desc.dtype, [STAGES * 4 * BOXES, BOX, HALF], kv_desc.layout)
    queries = gl.allocate_shared_memory(q_desc.dtype, [4, QUERIES // GROUP, GROUP, HALF], q_desc.layout)
    weights = gl.allocate_shared_memory(q_desc.dtype, [QUERIES, KEYS], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_freed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
        mbarrier.init(freed.index(stage), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(q_freed.index(buffer), count=1)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_work = gl.load(num_items) * KV_HEADS
    gl.warp_specialize(
        [
            (_compute_blocks, (
                boxes, queries, weights, arrived, freed, q_freed, out_ptr, items, num_work, scale_log2,
                HEADS, KV_HEADS, QUERIES, STAGES,
            )),
            (_copy_blocks, (
                q_desc, kv_desc, boxes, queries, arrived, freed, q_freed, block_tables, table_stride, items, num_work,
                HEADS, KV_HEADS, BLOCK_SIZE, BOX, QUERIES, STAGES,
            )),
        ],
        [1],
        [56],
    )  # fmt: skip


@gluon.jit
def _copy_blocks(
    q_desc, kv_desc, boxes, queries, arrived, freed, q_freed, block_tables, table_stride, items, num_work,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the tiles of the program's items, with the first one for the item's queries."""
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
        for index in range(gl.cdiv(end, KEYS)):
            _copy_tile(
                kv_desc, boxes, arrived, freed, table, index, end, head, count, index == 0,
                KV_HEADS, BLOCK_SIZE, BOX, QUERIES, STAGES,
            )  # fmt: skip
            if index == 0:
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        q_desc, [first_token, head * GROUP, half * HALF], arrived.index(count % STAGES),
                        queries.index(2 * buffer + half),
                    )  # fmt: skip
            count += 1
        turn += 1
        work = _dealt(turn)


@gluon.jit
def _compute_blocks(
    boxes, queries, weights, arrived, freed, q_freed, out_ptr, items, num_work, scale_log2,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the program's items as they arrive, split by split."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    layout: gl.constexpr = _products_layout(QUERIES)
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    matrices = boxes._reinterpret(boxes.dtype, [STAGES * 2, KEYS, HEAD_DIM], boxes.layout)
    blocks = queries._reinterpret(queries.dtype, [2, QUERIES, HEAD_DIM], flat)
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    count = 0
    turn = 0
    work = _dealt(turn)
    while work < num_work:
        item = items + work // KV_HEADS * ITEM_FIELDS
        first_token = gl.load(item)
        tokens = gl.load(item + 1)
        end = gl.load(item + 4)
        limits = gl.load(item + 5) + 1 + query // GROUP
        buffer = turn % 2
        tiles = gl.cdiv(end, KEYS)
        acc, maximum, total = _nothing(QUERIES, layout)
        for start in range(0, tiles, SPLIT_TILES):
            stop = gl.minimum(tiles, start + SPLIT_TILES)
            part, part_maximum, part_total = _attend(
                start, stop, count, end, limits, blocks.index(buffer), matrices, weights, arrived, freed, scale_log2,
                QUERIES, STAGES, layout,
            )  # fmt: skip
            acc, maximum, total = _join(acc, maximum, total, part, part_maximum, part_total)
            count += stop - start
        mbarrier.arrive(q_freed.index(buffer), count=1)  # behind the last tile's barrier
        mine = query // GROUP < tokens
        heads = work % KV_HEADS * GROUP + query % GROUP
        places = ((first_token + query // GROUP).to(gl.int64) * HEADS + heads) * HEAD_DIM
        result = _normalised(acc, total, mine)
        gl.store(
            out_ptr + places[None, :] + dims[:, None], result.to(out_ptr.dtype.element_ty), mask=mine[None, :]
        )
        turn += 1
        work = _dealt(turn)
