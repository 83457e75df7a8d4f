"""Attention of rows with one query on Hopper: keys and values stream through shared memory into the tensor cores.

The work is cut and numbered as in decode.py. One warp copies: it runs STAGES tiles of KEYS keys ahead of the others,
across the borders of rows and heads, so that memory stays busy while results are written and ranges end. The other
four compute with the keys as the rows of the matrix products: scores [KEYS, QUERIES] = K · Qᵀ, results
[HEAD_DIM, QUERIES] = Vᵀ · weights. In shared memory the left half of a matrix lies before the right one, rows of 128
bytes each: the copy engine fills them box by box of HALF elements.

Of a cache of 8 bits (NARROW) narrow.py copies the tiles and attends to them; queries and weights are float16 then.
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

from oneloop_kernels.ops.paged_attention.triton import narrow
from oneloop_kernels.ops.paged_attention.triton.narrow import dims_of_rows, operand_layout
from oneloop_kernels.ops.paged_attention.triton.planning import PROGRAM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.softmax import HIDDEN

KEYS = tl.constexpr(64)
"""Of a tile of a cache of 16 bits."""
HALF = tl.constexpr(64)
HEAD_DIM = tl.constexpr(128)


@gluon.constexpr_function
def _is_narrow(dtype):
    return dtype.primitive_bitwidth == 8


@gluon.constexpr_function
def _products_layout(queries):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, queries, 16])


@gluon.jit(do_not_specialize=["table_stride"])
def stream_kernel(
    q_desc, kv_desc, out_ptr,
    row_slot, seq_lens, block_tables, table_stride, programs, split,
    partial_acc, partial_norm, tickets, scale_log2, value_scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    TILE: gl.constexpr, TOGETHER: gl.constexpr, STAGES: gl.constexpr, MERGE: gl.constexpr, BESIDE: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """One program of a fixed grid, four warps and one.

    q_desc: of qkv as rows of HEAD_DIM elements, boxes [QUERIES, HALF]; kv_desc: of the cache as such rows, in the order
    block, head (keys' before values'), token; boxes [BOX, HALF], BOX = min(KEYS, BLOCK_SIZE); of 8 bits see narrow.py.
    QUERIES: the query heads of a key head, and what of the rows after them fills up a matrix product. out: as in the
    contract. TILE: keys of a tile, of TOGETHER heads: KEYS and 1 but for 8 bits.
    row_slot, seq_lens, block_tables, programs, split, partial_acc, partial_norm, tickets, value_scale: as in decode.py.

    When the kernel begins, all is complete that came ahead of the kernel before it: the plan, the tables, and all keys
    and values but those of the step's own tokens. So the first tiles are asked for before it waits. BESIDE: also the
    queries and the step's own keys and values; then it waits only at its end (see decode.py).
    """
    NARROW: gl.constexpr = _is_narrow(kv_desc.dtype)
    gl.static_assert(NARROW or (TILE == KEYS and TOGETHER == 1))
    queries = gl.allocate_shared_memory(q_desc.dtype, [2 * (STAGES + 1), QUERIES, HALF], q_desc.layout)
    if NARROW:
        boxes = gl.allocate_shared_memory(
            kv_desc.dtype, [STAGES * 2 * (TILE // (BOX * TOGETHER)), TOGETHER, BOX, HEAD_DIM], kv_desc.layout
        )
        weights = gl.allocate_shared_memory(gl.float16, [2, QUERIES, TILE], operand_layout(QUERIES, TILE))
        ordered = gl.allocate_shared_memory(
            gl.float16, [QUERIES, HEAD_DIM], operand_layout(QUERIES, HEAD_DIM)
        )
    else:
        boxes = gl.allocate_shared_memory(
            kv_desc.dtype, [STAGES * 4 * (KEYS // BOX), BOX, HALF], kv_desc.layout
        )
        weights = gl.allocate_shared_memory(q_desc.dtype, [QUERIES, KEYS], q_desc.layout)
        ordered = queries
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
    first = program * base + gl.minimum(program, extra)
    left = base + (program < extra).to(gl.int32)
    record = programs + program * PROGRAM_FIELDS
    row = gl.load(record)
    tile = gl.load(record + 1)
    pairs = gl.load(record + 2)
    length = gl.load(record + 3)
    slot = gl.load(record + 4)
    gl.warp_specialize(
        [
            (_compute, (
                boxes, queries, weights, ordered, arrived, freed, out_ptr, seq_lens, partial_acc,
                partial_norm, tickets, scale_log2, value_scale, row, tile, pairs, length, left, first, base, extra,
                HEADS, KV_HEADS, BOX, QUERIES, TILE, TOGETHER, STAGES, MERGE,
            )),
            (_copy, (
                q_desc, kv_desc, boxes, queries, arrived, freed, row_slot, seq_lens, block_tables, table_stride,
                row, tile, pairs, length, slot, left,
                HEADS, KV_HEADS, BLOCK_SIZE, BOX, QUERIES, TILE, TOGETHER, STAGES, BESIDE, USE_PDL,
            )),
        ],
        [1],
        [32 if NARROW else 56],
    )  # fmt: skip


@gluon.jit
def _copy(
    q_desc, kv_desc, boxes, queries, arrived, freed, row_slot, seq_lens, block_tables, table_stride,
    row, tile, pairs, length, slot, left,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr,
    TILE: gl.constexpr, TOGETHER: gl.constexpr, STAGES: gl.constexpr, BESIDE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Ask for the range's tiles, in order."""
    GROUP: gl.constexpr = HEADS // KV_HEADS * TOGETHER
    count = 0
    for pair in range(pairs):
        tiles = gl.cdiv(length, TILE // TOGETHER)
        head = tile // tiles
        begin = tile % tiles
        end = gl.minimum(tiles, begin + left)
        table = block_tables + slot.to(gl.int64) * table_stride
        query = row * (HEADS + 2 * KV_HEADS) + head * GROUP
        count = _copy_pair(
            q_desc, kv_desc, boxes, queries, arrived, freed, table, query, pair, begin, end, tiles, length, head, count,
            KV_HEADS, BLOCK_SIZE, BOX, TOGETHER, QUERIES, STAGES, BESIDE, USE_PDL,
        )  # fmt: skip
        row, tile, left, row_ends = _advance(row, tile, left, end - begin, tiles, KV_HEADS // TOGETHER)
        more = row_ends & (left > 0)
        length = gl.load(seq_lens + row, mask=more, other=length)
        slot = gl.load(row_slot + row, mask=more, other=slot)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()  # also without any work: who waits for this kernel waits for those before it


@gluon.jit
def _copy_pair(
    q_desc, kv_desc, boxes, queries, arrived, freed, table, query, pair, begin, end, tiles, length, head, count,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, TOGETHER: gl.constexpr,
    QUERIES: gl.constexpr, STAGES: gl.constexpr, BESIDE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Ask for a pair's tiles begin … end − 1, each as soon as its stage is free; with the first for its queries, row
    `query` of theirs. pair, count: how many pairs and tiles there were before. → tiles with these.

    The wait for the kernel before this one comes when all stages are asked for, or ahead of a row's last tile.
    """
    place = pair % (STAGES + 1) * 2
    later = begin
    if USE_PDL and not BESIDE:
        if pair == 0:
            later = gl.minimum(gl.minimum(begin + STAGES, tiles - 1), end)
            for index in range(begin, later):
                _copy_any_tile(
                    kv_desc, boxes, arrived, freed, table, index, length, head, count, index == begin,
                    KV_HEADS, BLOCK_SIZE, BOX, TOGETHER, QUERIES, STAGES,
                )  # fmt: skip
                count += 1
            tl.extra.cuda.gdc_wait()
            if later > begin:
                _copy_queries(q_desc, queries, arrived.index(0), query, place)
    for index in range(later, end):
        _copy_any_tile(
            kv_desc, boxes, arrived, freed, table, index, length, head, count, index == begin,
            KV_HEADS, BLOCK_SIZE, BOX, TOGETHER, QUERIES, STAGES,
        )  # fmt: skip
        if index == begin:
            _copy_queries(q_desc, queries, arrived.index(count % STAGES), query, place)
        count += 1
    return count


@gluon.jit
def _copy_any_tile(
    kv_desc, boxes, arrived, freed, table, index, length, head, count, with_queries,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, TOGETHER: gl.constexpr,
    QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of 16 bits or of 8."""
    if _is_narrow(kv_desc.dtype):
        narrow.copy_tile(
            kv_desc, boxes, arrived, freed, table, index, length, head, count, with_queries,
            KV_HEADS, BLOCK_SIZE, BOX, TOGETHER, QUERIES, STAGES,
        )  # fmt: skip
    else:
        _copy_tile(
            kv_desc, boxes, arrived, freed, table, index, length, head, count, with_queries,
            KV_HEADS, BLOCK_SIZE, BOX, QUERIES, STAGES,
        )  # fmt: skip


@gluon.jit
def _copy_tile(
    kv_desc, boxes, arrived, freed, table, index, length, head, count, with_queries,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a tile, the count-th of all, when its stage is free; it has arrived when its queries have too.

    Boxes past the end of a row are asked for outside of the cache: they read as zeros.
    """
    BOXES: gl.constexpr = KEYS // BOX
    KV_BYTES: gl.constexpr = 2 * KEYS * HEAD_DIM * 2
    Q_BYTES: gl.constexpr = QUERIES * HEAD_DIM * 2
    stage = count % STAGES
    barrier = arrived.index(stage)
    blocks = ()
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        blocks = blocks + (gl.load(table + position // BLOCK_SIZE, mask=position < length, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(freed.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(barrier, KV_BYTES + Q_BYTES, pred=with_queries)
    mbarrier.expect(barrier, KV_BYTES, pred=not with_queries)
    for box in gl.static_range(BOXES):
        position = index * KEYS + box * BOX
        keys = (blocks[box] * (2 * KV_HEADS) + head) * BLOCK_SIZE + position % BLOCK_SIZE
        values = gl.where(position < length, keys + KV_HEADS * BLOCK_SIZE, -BOX)
        keys = gl.where(position < length, keys, -BOX)
        target = stage * (4 * BOXES) + box
        tma.async_copy_global_to_shared(kv_desc, [keys, 0], barrier, boxes.index(target))
        tma.async_copy_global_to_shared(kv_desc, [keys, HALF], barrier, boxes.index(target + BOXES))
        tma.async_copy_global_to_shared(kv_desc, [values, 0], barrier, boxes.index(target + 2 * BOXES))
        tma.async_copy_global_to_shared(kv_desc, [values, HALF], barrier, boxes.index(target + 3 * BOXES))


@gluon.jit
def _copy_queries(q_desc, queries, barrier, row, place):
    """Ask for both halves of a pair's queries."""
    tma.async_copy_global_to_shared(q_desc, [row, 0], barrier, queries.index(place))
    tma.async_copy_global_to_shared(q_desc, [row, HALF], barrier, queries.index(place + 1))


@gluon.jit
def _advance(row, tile, left, done, tiles, KV_HEADS: gl.constexpr):
    """Row, tile in the row and tiles left after so many done; whether the row has ended."""
    tile += done
    row_ends = tile == tiles * KV_HEADS
    row += row_ends.to(gl.int32)
    tile = gl.where(row_ends, 0, tile)
    return row, tile, left - done, row_ends


@gluon.jit
def _compute(
    boxes, queries, weights, ordered, arrived, freed, out_ptr, seq_lens, partial_acc, partial_norm, tickets,
    scale_log2, value_scale, row, tile, pairs, length, left, first, base, extra,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, BOX: gl.constexpr, QUERIES: gl.constexpr, TILE: gl.constexpr,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """Attend to the range's tiles as they arrive; write the pairs that are whole, leave what is not."""
    GROUP: gl.constexpr = HEADS // KV_HEADS * TOGETHER
    NARROW: gl.constexpr = _is_narrow(boxes.dtype)
    layout: gl.constexpr = _products_layout(QUERIES)
    heads = queries._reinterpret(queries.dtype, [STAGES + 1, QUERIES, HEAD_DIM], queries.layout)
    start_of_range = first
    number = first
    count = 0
    program = gl.program_id(0)
    for pair in range(pairs):
        tiles = gl.cdiv(length, TILE // TOGETHER)
        head = tile // tiles
        begin = tile % tiles
        end = gl.minimum(tiles, begin + left)
        if NARROW:
            acc, maximum, total = narrow.attend(
                begin, end, count, length, heads.index(pair % (STAGES + 1)), boxes, weights, ordered, arrived, freed,
                scale_log2, HEADS // KV_HEADS, BOX, TOGETHER, QUERIES, TILE, STAGES, layout,
            )  # fmt: skip
        else:
            matrices = boxes._reinterpret(boxes.dtype, [STAGES * 2, KEYS, HEAD_DIM], boxes.layout)
            acc, maximum, total = _attend(
                begin, end, count, length, heads.index(pair % (STAGES + 1)), matrices, weights, arrived, freed,
                scale_log2, QUERIES, STAGES, layout,
            )  # fmt: skip
        whole = end - begin == tiles
        if not whole:
            own = 2 * program + (number != start_of_range).to(gl.int32)
            whole, acc, total = _settle(
                acc, maximum, total, own, number - begin, tiles, base, extra,
                partial_acc, partial_norm, tickets, GROUP, QUERIES, MERGE, layout,
            )  # fmt: skip
        if whole:
            _write(acc, total, row, head, out_ptr, value_scale, HEADS, GROUP, QUERIES, NARROW, layout)
        count += end - begin
        number += end - begin
        row, tile, left, row_ends = _advance(row, tile, left, end - begin, tiles, KV_HEADS // TOGETHER)
        length = gl.load(seq_lens + row, mask=row_ends & (left > 0), other=length)


@gluon.jit
def _attend(
    begin, end, count, length, queries, matrices, weights, arrived, freed, scale_log2,
    QUERIES: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The tiles begin … end − 1 of a pair, the first of which is the range's count-th.

    → the result [HEAD_DIM, QUERIES], not normalised; maxima (base 2) and sums [QUERIES].
    """
    acc = gl.zeros([HEAD_DIM, QUERIES], gl.float32, layout)
    sums = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    none = gl.zeros([KEYS, QUERIES], gl.float32, layout)
    maximum = gl.full([QUERIES], HIDDEN, gl.float32, gl.SliceLayout(0, layout))
    inside = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    for index in range(begin, end):
        stage = count % STAGES
        mbarrier.wait(arrived.index(stage), count // STAGES & 1)
        keys, values = matrices.index(2 * stage), matrices.index(2 * stage + 1)
        scores = warpgroup_mma(keys, queries.permute((1, 0)), none, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        seen = (inside < length - index * KEYS)[:, None]
        scores = gl.where(seen, scores, HIDDEN)
        new_maximum = gl.maximum(maximum, gl.max(scores, 0) * scale_log2)
        powers = gl.where(seen, gl.exp2(scores * scale_log2 - new_maximum[None, :]), 0.0)
        shrink = gl.exp2(maximum - new_maximum)[None, :]
        maximum = new_maximum
        sums = sums * shrink + powers
        acc = acc * shrink
        weights.permute((1, 0)).store(powers.to(weights.dtype))
        if length - index * KEYS < KEYS:
            _clear(values, length - index * KEYS)
        fence_async_shared()
        gl.thread_barrier()  # every warp's weights are there
        acc = warpgroup_mma(values.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()  # every warp has read the values
        mbarrier.arrive(freed.index(stage), count=1)
        count += 1
    return acc, maximum, gl.sum(sums, 0)


@gluon.jit
def _clear(values, length):
    """Zeros for the values from `length` on: nobody has written them, and zero times infinity would be felt."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    values.store(gl.where((rows < length)[:, None], values.load(layout), 0.0).to(values.dtype))


@gluon.jit
def _settle(
    acc, maximum, total, own, pair_start, tiles, base, extra, partial_acc, partial_norm, tickets,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, MERGE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Leave a partial result in slot `own`; if it is the last to come of its pair, whole is true, and acc and total the
    pair's. pair_start: number of the pair's first tile, of so many tiles.
    """
    norm_sums = partial_norm + 2 * gl.num_programs(0) * GROUP
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    places = _places(QUERIES, layout)
    mine = (group < GROUP)[None, :]
    gl.store(partial_acc + own.to(gl.int64) * (GROUP * HEAD_DIM) + places, acc, mask=mine)
    gl.store(partial_norm + own * GROUP + group, maximum, mask=group < GROUP)
    gl.store(norm_sums + own * GROUP + group, total, mask=group < GROUP)
    first = _program_of(pair_start, base, extra)
    last = _program_of(pair_start + tiles - 1, base, extra)
    gl.thread_barrier()  # all of it is written before the ticket is taken
    ticket = gl.atomic_add(tickets + first, 1, sem="acq_rel", scope="gpu")
    whole = ticket == last - first
    if whole:
        gl.store(tickets + first, 0)
        starts_before = first * base + gl.minimum(first, extra) < pair_start
        acc, total = _merge(
            partial_acc, partial_norm, norm_sums, first, last, starts_before.to(gl.int32),
            GROUP, QUERIES, MERGE, layout,
        )  # fmt: skip
    return whole, acc, total


@gluon.jit
def _program_of(number, base, extra):
    """Which program has the tile of this number."""
    longer = extra * (base + 1)
    after = extra + (number - longer) // gl.maximum(base, 1)
    return gl.where(number < longer, number // (base + 1), after)


@gluon.jit
def _places(QUERIES: gl.constexpr, layout: gl.constexpr):
    """Offsets in a pair's partial results."""
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    return group[None, :] * HEAD_DIM + dims[:, None]


@gluon.jit
def _merge(
    partial_acc, partial_norm, norm_sums, first, last, first_is_second,
    GROUP: gl.constexpr, QUERIES: gl.constexpr, MERGE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add up the partial results of the programs first … last, in that order, MERGE loads at a time.

    Past the first-level cache: others wrote while we ran.
    """
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    places = _places(QUERIES, layout)
    acc = gl.zeros([HEAD_DIM, QUERIES], gl.float32, layout)
    total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, layout))
    maximum = gl.full([QUERIES], HIDDEN, gl.float32, gl.SliceLayout(0, layout))
    for start in range(first, last + 1, MERGE):
        for ahead in gl.static_range(MERGE):
            program = start + ahead
            slot = gl.where(program == first, 2 * first + first_is_second, 2 * program)
            there = (group < GROUP) & (program <= last)
            other = gl.load(
                partial_norm + slot * GROUP + group, mask=there, other=HIDDEN, cache_modifier=".cg"
            )
            sums = gl.load(norm_sums + slot * GROUP + group, mask=there, other=0.0, cache_modifier=".cg")
            place = partial_acc + slot.to(gl.int64) * (GROUP * HEAD_DIM) + places
            part = gl.load(place, mask=there[None, :], other=0.0, cache_modifier=".cg")
            new_maximum = gl.maximum(maximum, other)
            shrink = gl.exp2(maximum - new_maximum)
            weight = gl.exp2(other - new_maximum)
            total = total * shrink + sums * weight
            acc = acc * shrink[None, :] + part * weight[None, :]
            maximum = new_maximum
    return acc, total


@gluon.jit
def _write(
    acc, total, row, head, out_ptr, value_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, QUERIES: gl.constexpr, NARROW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Normalise and store."""
    group = gl.arange(0, QUERIES, gl.SliceLayout(0, layout))
    mine = group < GROUP
    factor = value_scale / gl.where(mine, total, 1.0)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    if NARROW:
        dims = dims_of_rows(dims)
    first = (row.to(gl.int64) * HEADS + head * GROUP) * HEAD_DIM
    places = out_ptr + first + group[None, :] * HEAD_DIM + dims[:, None]
    gl.store(places, (acc * factor[None, :]).to(out_ptr.dtype.element_ty), mask=mine[None, :])
