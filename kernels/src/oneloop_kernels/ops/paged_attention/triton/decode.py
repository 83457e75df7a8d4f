"""Attention of rows with one query. The work, tiles of BLOCK_N keys of one row and key head, is cut into equal ranges.

Tiles are numbered row by row, in a row head by head, in a head by position. Each program takes one contiguous range (as
planned, see planning.py). What lies wholly in the range is written at once. Of a (row, head) pair that is cut, each
program leaves a partial result: slot 2 · program for the first pair of its range, + 1 for one that goes on in the next
range. Who comes last adds the partial results up in the order of their positions, so that results do not depend on
who that was.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.paged_attention.triton.planning import PROGRAM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.softmax import (
    HIDDEN,
    LOG2_E,
    absorb,
    as_operand,
    key_offsets,
    table_entries,
)


@triton.jit
def decode_kernel(
    qkv, cache, out, sinks,
    row_slot, seq_lens, block_tables, table_stride,
    programs, split, shared_lens, shared_chunks,
    partial_acc, partial_norm, tickets, shared_acc, shared_norm, max_rows,
    stride_block, stride_token, stride_head, scale_log2, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_ROWS: tl.constexpr, MERGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, BESIDE: tl.constexpr, WAIT_SHARED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program of a fixed grid. DIM: HEAD_DIM rounded up to a power of two, GROUP_ROWS: query heads of a key head.

    qkv, out, cache, sinks: as in the contract. programs: [programs, PROGRAM_FIELDS], split: [2], see planning.py.
    fp32: partial_acc [2 · programs, GROUP_ROWS, HEAD_DIM], partial_norm [2, 2 · programs, GROUP_ROWS]: maxima, sums.
    tickets: [programs] int32, 0 before and after. value_scale: factor on the results. SHARED: most chunks of what a row
    shares, or 0; shared_…: see planning.py and tiles.py.
    BESIDE: the kernel before is tiles.py. It lets this one start once all that it waited for has ended; so this one
    fills what it leaves of the multiprocessors, and waits for it only at the end (whoever waits for this one has then
    waited for both), or with WAIT_SHARED before it takes up that kernel's results.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = max(GROUP_ROWS, 16)
    program = tl.program_id(0)
    if USE_PDL and not BESIDE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    base = tl.load(split)
    extra = tl.load(split + 1)
    mine = programs + program * PROGRAM_FIELDS
    row = tl.load(mine)
    tile = tl.load(mine + 1)
    pairs = tl.load(mine + 2)
    length = tl.load(mine + 3)
    slot = tl.load(mine + 4)
    shared = tl.load(mine + 5)
    left = base + (program < extra).to(tl.int32)
    start_of_range = program * base + tl.minimum(program, extra)
    number = start_of_range
    for _ in range(pairs):
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(length - WINDOW, 0)
        first_tile = tl.maximum(first_key, shared) // BLOCK_N
        tiles = tl.cdiv(length, BLOCK_N) - first_tile
        head = tile // tiles
        begin = tile % tiles
        end = tl.minimum(tiles, begin + left)
        acc, maximum, total = _attend(
            first_tile + begin, first_tile + end, first_key, length, row, head, qkv, cache,
            block_tables + slot.to(tl.int64) * table_stride, stride_block, stride_token, stride_head, scale_log2,
            HEADS, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, ROWS, SOFT_CAP, STAGES,
        )  # fmt: skip
        if end - begin == tiles:
            _write(
                acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows,
                value_scale, HEADS, GROUP, ROWS, HEAD_DIM, DIM, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
            )  # fmt: skip
        else:
            own = 2 * program + (number != start_of_range).to(tl.int32)
            _leave(
                acc, maximum, total, own, number - begin, tiles, base, extra, partial_acc, partial_norm, tickets,
                row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
                HEADS, GROUP, GROUP_ROWS, ROWS, HEAD_DIM, DIM, MERGE, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
            )  # fmt: skip
        number += end - begin
        left -= end - begin
        tile += end - begin
        row_ends = tile == tiles * KV_HEADS
        row += row_ends.to(tl.int32)
        tile = tl.where(row_ends, 0, tile)
        more = row_ends & (left > 0)
        length = tl.load(seq_lens + row, mask=more, other=length)
        slot = tl.load(row_slot + row, mask=more, other=slot)
        if SHARED > 0:
            shared = tl.load(shared_lens + row, mask=more, other=shared)
    if USE_PDL and BESIDE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _attend(
    begin, end, first_key, length, row, head, qkv, cache, table, stride_block, stride_token, stride_head, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SOFT_CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row's query heads of one key head over the tiles begin … end − 1 → [ROWS, DIM], maxima and sums [ROWS]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    blocks = table_entries(table, begin * BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    here = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head * GROUP) * HEAD_DIM
    q = as_operand(
        tl.load(qkv + query + group[:, None] * HEAD_DIM + dims[None, :], mask=here, other=0.0), cache
    )
    keys = cache + head.to(tl.int64) * stride_head
    values = keys + KV_HEADS * stride_head
    acc = tl.zeros([ROWS, DIM], tl.float32)
    maximum = tl.full([ROWS], HIDDEN, tl.float32)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for index in tl.range(begin, end, num_stages=STAGES):
        start = index * BLOCK_N
        positions = start + tl.arange(0, BLOCK_N)
        valid = (positions < length) & (positions >= first_key)
        offsets = key_offsets(blocks, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        blocks = table_entries(table, start + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        acc, maximum, sums = absorb(
            products, valid[None, :], scale_log2, v.to(q.dtype), acc, maximum, sums, True, SOFT_CAP, True
        )
    return acc, maximum, tl.sum(sums, 1)


@triton.jit
def _leave(
    acc, maximum, total, slot, pair_start, tiles, base, extra, partial_acc, partial_norm, tickets,
    row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MERGE: tl.constexpr,
    HAS_SINKS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Store a partial result in a slot; if it is the last of its pair, add all of them up.

    pair_start: number of the pair's first tile, of so many tiles.
    """
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    mine = group < GROUP
    place = slot.to(tl.int64) * GROUP_ROWS + group
    inside = mine[:, None] & (dims < HEAD_DIM)[None, :]
    norm_sums = partial_norm + 2 * tl.num_programs(0) * GROUP_ROWS
    tl.store(partial_acc + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    tl.store(partial_norm + place, maximum, mask=mine)
    tl.store(norm_sums + place, total, mask=mine)
    first = _program_of(pair_start, base, extra)
    last = _program_of(pair_start + tiles - 1, base, extra)
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets + first, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        tl.atomic_xchg(tickets + first, 0, sem="relaxed", scope="gpu")
        first_slot = 2 * first + (first * base + tl.minimum(first, extra) < pair_start).to(tl.int32)
        _merge(
            first, last, first_slot, partial_acc, partial_norm, norm_sums, row, head, out, sinks,
            shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
            HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIM, MERGE, HAS_SINKS, SHARED, WAIT,
        )  # fmt: skip


@triton.jit
def _program_of(number, base, extra):
    """Which program has the tile of this number."""
    longer = extra * (base + 1)
    after = extra + (number - longer) // tl.maximum(base, 1)
    return tl.where(number < longer, number // (base + 1), after)


@triton.jit
def _merge(
    first, last, first_slot, partial_acc, partial_norm, norm_sums, row, head, out, sinks,
    shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    MERGE: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of the programs first … last, MERGE at a time, and write the pair's result.

    Loads go past the L1 cache: other multiprocessors wrote this memory while the kernel ran.
    """
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    acc = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    maximum = tl.full([GROUP_ROWS], HIDDEN, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    for index in range(first, last + 1, MERGE):
        programs = index + tl.arange(0, MERGE)
        slots = tl.where(programs == first, first_slot, 2 * programs)
        places = slots.to(tl.int64)[:, None] * GROUP_ROWS + group[None, :]
        there = (programs <= last)[:, None] & (group < GROUP)[None, :]
        maxima = tl.load(partial_norm + places, mask=there, other=HIDDEN, cache_modifier=".cg")
        totals = tl.load(norm_sums + places, mask=there, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_acc + places[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        maximum = new_maximum
    _write(
        acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
        HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIM, HAS_SINKS, SHARED, WAIT,
    )  # fmt: skip


@triton.jit
def _write(
    acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows, value_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Add what the row shares with others, and the sinks; normalise; store. acc: [ROWS, DIM]."""
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    heads = head * GROUP + group
    mine = group < GROUP
    inside = mine[:, None] & (dims < HEAD_DIM)[None, :]
    if SHARED > 0:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        chunks = tl.load(shared_chunks + row)
        for chunk in tl.static_range(SHARED):
            there = mine & (chunk < chunks)
            places = (chunk * max_rows + row).to(tl.int64) * HEADS + heads
            other_maximum = tl.load(shared_norm + 2 * places, mask=there, other=HIDDEN, cache_modifier=".cg")
            other_total = tl.load(shared_norm + 2 * places + 1, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(
                shared_acc + places[:, None] * HEAD_DIM + dims[None, :],
                mask=there[:, None] & inside,
                other=0.0,
                cache_modifier=".cg",
            )
            new_maximum = tl.maximum(maximum, other_maximum)
            weight = tl.exp2(other_maximum - new_maximum)
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + other_total * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            maximum = new_maximum
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.exp2(sink - new_maximum)
        acc = acc * shrink[:, None]
    total = tl.where(mine, total, 1.0)
    place = (row.to(tl.int64) * HEADS + heads) * HEAD_DIM
    result = acc / total[:, None] * value_scale
    tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
