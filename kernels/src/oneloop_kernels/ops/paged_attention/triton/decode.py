"""Attention of rows with one query. The work, tiles of BLOCK_N keys of (row, key head) pairs, is cut among programs.

Tiles are numbered row by row, in a row head by head, in a head by position; each program takes consecutive ones, as
planned (planning.py). With few rows, a program takes a piece of one pair (piece_kernel), otherwise an equal share that
may touch several pairs (range_kernel). What lies wholly with one program is written at once. Of a pair that is cut,
each program leaves a partial result: in slot 2 · program for its first pair, + 1 for one that goes on in the next
program. The program that has the pair's end adds the partial results up, after the rest of its work: by then they have
come, for all take equally long.

Much of the time of small steps is latency: of the plan, then the table, then the keys. All three are fetched (keys into
registers or into the L2 cache) before a kernel waits for the one in front of it; see launch.py for what makes that
right. Only the newest token's key and value may still be missing then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.paged_attention.triton.planning import PROGRAM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.results import leave, merge, write
from oneloop_kernels.ops.paged_attention.triton.softmax import (
    HIDDEN,
    absorb,
    key_offsets,
    table_entries,
)

SECTOR = tl.constexpr(32)
"""Bytes that the L2 cache fetches at a time."""


@triton.jit
def piece_kernel(
    qkv, cache, out, sinks,
    row_slot, seq_lens, block_tables, table_stride,
    programs, shared_lens, shared_chunks,
    partial_acc, partial_norm, shared_acc, shared_norm, max_rows,
    stride_block, stride_token, stride_head, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_ROWS: tl.constexpr, MERGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, BESIDE: tl.constexpr, WAIT_SHARED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Each program has at most one piece of a pair. Its first tile is loaded before the wait, but for the newest token.

    One program of a fixed grid. DIM: HEAD_DIM rounded up to a power of two, GROUP_ROWS: query heads of a key head.
    qkv, out, cache, sinks: as in the contract. programs: [programs, PROGRAM_FIELDS], see planning.py.
    Bits of fp32: partial_acc [2 · programs, GROUP_ROWS, HEAD_DIM], partial_norm [2 · programs, GROUP_ROWS, 2]: maxima
    and sums; ABSENT before and after. SHARED: most chunks of what a row shares, or 0; shared_…: see planning.py and
    tiles.py. PREFETCH: so many keys of a pair are fetched into the L2 cache ahead of time, or 0.
    BESIDE: the kernel before is tiles.py. It lets this one start once all that it waited for has ended; so this one
    fills what it leaves of the multiprocessors, and waits for it only at the end (whoever waits for this one has then
    waited for both), or with WAIT_SHARED before it takes up that kernel's results.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = max(GROUP_ROWS, 16)
    program = tl.program_id(0)
    row, head, begin, left, pairs, length, slot, shared, merge_first, merge_slot = _record(programs, program)
    first_key, start, stop = _span(length, shared, begin, left, WINDOW, BLOCK_N)
    table = block_tables + slot.to(tl.int64) * table_stride
    keys, inside = _tile(
        cache, table, head, start * BLOCK_N, first_key, length, stride_block, stride_token, stride_head,
        HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    values = keys + KV_HEADS * stride_head
    newest = (start * BLOCK_N + tl.arange(0, BLOCK_N) == length - 1)[:, None] & inside
    k = tl.load(keys, mask=inside & ~newest, other=0.0)
    v = tl.load(values, mask=inside & ~newest, other=0.0)
    if PREFETCH > 0:
        if stop > start + 1:
            _prefetch(
                cache, table, head, (start + 1) * BLOCK_N, tl.minimum(stop * BLOCK_N, length), stride_block,
                stride_token, stride_head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, PREFETCH,
            )  # fmt: skip
    if USE_PDL and not BESIDE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if pairs > 0:
        q = _queries(qkv, row, head, HEADS, KV_HEADS, HEAD_DIM, DIM, ROWS)
        if (start + 1) * BLOCK_N >= length:
            k = tl.load(keys, mask=newest, other=k)
            v = tl.load(values, mask=newest, other=v)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        maximum = tl.full([ROWS], HIDDEN, tl.float32)
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        positions = start * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = ((positions < length) & (positions >= first_key))[None, :]
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, maximum, sums = absorb(products, seen, scale_log2, v, acc, maximum, sums, True, SOFT_CAP, True)
        if start + 1 < stop:
            acc, maximum, sums = _walk(
                start + 1, stop, first_key, length, head, q, acc, maximum, sums, cache, table,
                stride_block, stride_token, stride_head, scale_log2,
                KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, SOFT_CAP, STAGES,
            )  # fmt: skip
        total = tl.sum(sums, 1)
        if (begin == 0) & (stop * BLOCK_N >= length):
            write(
                acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows,
                HEADS, GROUP, ROWS, HEAD_DIM, DIM, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
            )  # fmt: skip
        else:
            leave(
                acc, maximum, total, 2 * program, partial_acc, partial_norm,
                GROUP, GROUP_ROWS, ROWS, HEAD_DIM, DIM,
            )  # fmt: skip
        if merge_first >= 0:
            merge(
                merge_first, program, merge_slot, partial_acc, partial_norm, row, head, out, sinks,
                shared_chunks, shared_acc, shared_norm, max_rows,
                HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIM, MERGE, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
            )  # fmt: skip
    if USE_PDL and BESIDE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def range_kernel(
    qkv, cache, out, sinks,
    row_slot, seq_lens, block_tables, table_stride,
    programs, shared_lens, shared_chunks,
    partial_acc, partial_norm, shared_acc, shared_norm, max_rows,
    stride_block, stride_token, stride_head, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_ROWS: tl.constexpr, MERGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, BESIDE: tl.constexpr, WAIT_SHARED: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Each program has an equal share of all tiles, which may touch several pairs.

    One program of a fixed grid. DIM: HEAD_DIM rounded up to a power of two, GROUP_ROWS: query heads of a key head.
    qkv, out, cache, sinks: as in the contract. programs: [programs, PROGRAM_FIELDS], see planning.py.
    Bits of fp32: partial_acc [2 · programs, GROUP_ROWS, HEAD_DIM], partial_norm [2 · programs, GROUP_ROWS, 2]: maxima
    and sums; ABSENT before and after. SHARED: most chunks of what a row shares, or 0; shared_…: see planning.py and
    tiles.py. PREFETCH: so many keys of a pair are fetched into the L2 cache ahead of time, or 0.
    BESIDE: the kernel before is tiles.py. It lets this one start once all that it waited for has ended; so this one
    fills what it leaves of the multiprocessors, and waits for it only at the end (whoever waits for this one has then
    waited for both), or with WAIT_SHARED before it takes up that kernel's results.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = max(GROUP_ROWS, 16)
    program = tl.program_id(0)
    row, head, begin, left, pairs, length, slot, shared, merge_first, merge_slot = _record(programs, program)
    first_key, start, stop = _span(length, shared, begin, left, WINDOW, BLOCK_N)
    table = block_tables + slot.to(tl.int64) * table_stride
    merged_row, merged_head, part = row, head, 2 * program
    if USE_PDL and not BESIDE:
        if PREFETCH > 0:
            _prefetch(
                cache, table, head, start * BLOCK_N, tl.minimum(stop * BLOCK_N, length), stride_block,
                stride_token, stride_head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, PREFETCH,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for _ in tl.range(0, pairs, num_stages=1):
        whole = (begin == 0) & (stop * BLOCK_N >= length)
        left -= stop - start
        next_row, next_head, next_length, next_slot = row, head, length, slot
        next_first_key, next_start, next_stop, next_table = first_key, start, stop, table
        if left > 0:
            if head == KV_HEADS - 1:
                next_row = row + 1
                next_head = 0
                next_length = tl.load(seq_lens + next_row)
                next_slot = tl.load(row_slot + next_row)
                if SHARED > 0:
                    shared = tl.load(shared_lens + next_row)
            else:
                next_head = head + 1
            next_first_key, next_start, next_stop = _span(next_length, shared, 0, left, WINDOW, BLOCK_N)
            next_table = block_tables + next_slot.to(tl.int64) * table_stride
            if PREFETCH > 0:
                _prefetch(
                    cache, next_table, next_head, next_start * BLOCK_N,
                    tl.minimum(next_stop * BLOCK_N, next_length), stride_block, stride_token, stride_head,
                    KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, PREFETCH,
                )  # fmt: skip
        acc = tl.zeros([ROWS, DIM], tl.float32)
        maximum = tl.full([ROWS], HIDDEN, tl.float32)
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        q = _queries(qkv, row, head, HEADS, KV_HEADS, HEAD_DIM, DIM, ROWS)
        acc, maximum, sums = _walk(
            start, stop, first_key, length, head, q, acc, maximum, sums, cache, table,
            stride_block, stride_token, stride_head, scale_log2,
            KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, SOFT_CAP, STAGES,
        )  # fmt: skip
        total = tl.sum(sums, 1)
        if whole:
            write(
                acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows,
                HEADS, GROUP, ROWS, HEAD_DIM, DIM, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
            )  # fmt: skip
        else:
            leave(
                acc, maximum, total, part, partial_acc, partial_norm, GROUP, GROUP_ROWS, ROWS, HEAD_DIM, DIM
            )
        part = 2 * program + 1
        begin = 0
        row, head, length, slot = next_row, next_head, next_length, next_slot
        first_key, start, stop, table = next_first_key, next_start, next_stop, next_table
    if merge_first >= 0:
        merge(
            merge_first, program, merge_slot, partial_acc, partial_norm, merged_row, merged_head, out, sinks,
            shared_chunks, shared_acc, shared_norm, max_rows,
            HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIM, MERGE, HAS_SINKS, SHARED, WAIT_SHARED and USE_PDL,
        )  # fmt: skip
    if USE_PDL and BESIDE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _record(programs, program):
    """A program's fields, see PROGRAM_FIELDS."""
    mine = programs + program * PROGRAM_FIELDS
    row = tl.load(mine)
    head = tl.load(mine + 1)
    begin = tl.load(mine + 2)
    left = tl.load(mine + 3)
    pairs = tl.load(mine + 4)
    length = tl.load(mine + 5)
    slot = tl.load(mine + 6)
    shared = tl.load(mine + 7)
    merge_first = tl.load(mine + 8)
    merge_slot = tl.load(mine + 9)
    return row, head, begin, left, pairs, length, slot, shared, merge_first, merge_slot


@triton.jit
def _span(length, shared, begin, left, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """→ a pair's first key in sight; of its tiles the first and the one after the last that a range takes.

    begin: how many of the pair's tiles are before the range; left: how many the range has from there on.
    """
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    start = tl.maximum(first_key, shared) // BLOCK_N + begin
    return first_key, start, tl.minimum(tl.cdiv(length, BLOCK_N), start + left)


@triton.jit
def _prefetch(
    cache, table, head, start, limit, stride_block, stride_token, stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Have KEYS keys and values from start on, as far as they are below limit, fetched into the L2 cache.

    All multiprocessors see that cache: it does no harm that other kernels may still be writing some of them.
    """
    STEP: tl.constexpr = SECTOR * 8 // cache.dtype.element_ty.primitive_bitwidth
    positions = start + tl.arange(0, KEYS)
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < limit, other=0)
    offsets = blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE).to(tl.int64) * stride_token
    columns = tl.arange(0, DIM // STEP) * STEP
    there = ((positions < limit)[:, None] & (columns < HEAD_DIM)[None, :]).to(tl.int32)
    places = cache + head.to(tl.int64) * stride_head + offsets[:, None] + columns[None, :]
    for part in tl.static_range(2):
        tl.inline_asm_elementwise(
            "{ .reg .pred there; setp.ne.s32 there, $2, 0; @there prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [(places + part * KV_HEADS * stride_head).to(tl.int64), there],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _tile(
    cache, table, head, start, first_key, limit, stride_block, stride_token, stride_head,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where the keys of the tokens from start on are, [BLOCK_N, DIM]; and which first_key ≤ token < limit lets in."""
    positions = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM)
    blocks = table_entries(table, start, limit, BLOCK_SIZE, BLOCK_N)
    offsets = key_offsets(blocks, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
    inside = ((positions < limit) & (positions >= first_key))[:, None] & (dims < HEAD_DIM)[None, :]
    return cache + head.to(tl.int64) * stride_head + offsets[:, None] + dims[None, :], inside


@triton.jit
def _queries(
    qkv, row, head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, DIM]: of a row, the query heads of one key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    here = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head * GROUP) * HEAD_DIM
    return tl.load(qkv + query + group[:, None] * HEAD_DIM + dims[None, :], mask=here, other=0.0)


@triton.jit
def _walk(
    begin, end, first_key, length, head, q, acc, maximum, sums, cache, table,
    stride_block, stride_token, stride_head, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Absorb the tiles begin … end − 1."""
    dims = tl.arange(0, DIM)
    keys = cache + head.to(tl.int64) * stride_head
    values = keys + KV_HEADS * stride_head
    blocks = table_entries(table, begin * BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
    for index in tl.range(begin, end, num_stages=STAGES):
        start = index * BLOCK_N
        positions = start + tl.arange(0, BLOCK_N)
        valid = (positions < length) & (positions >= first_key)
        offsets = key_offsets(blocks, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
        blocks = table_entries(table, start + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, maximum, sums = absorb(
            products, valid[None, :], scale_log2, v, acc, maximum, sums, True, SOFT_CAP, True
        )
    return acc, maximum, sums
