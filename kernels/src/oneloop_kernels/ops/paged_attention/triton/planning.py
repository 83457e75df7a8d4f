"""The step's work, made on the device once per step by single programs: who does what in every layer's kernels.

A row shares its first tokens with its neighbours where runs of at least MIN_SHARERS consecutive rows have equal block
tables over at least MIN_SHARED tokens: those are read once for the whole run, by tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(8)
"""Of an item of tiles.py: first token, number of tokens, slot, first key, key after the last, position of the first
token, chunk, (unused)."""
PROGRAM_FIELDS = tl.constexpr(8)
"""Of a program of decode.py: where its range begins (row, tile of the row), how many pairs it touches, that row's
length, slot and shared tokens, (unused)."""
KEYS = tl.constexpr(128)
"""Shared tokens, and chunks of them, are multiples of this; tiles of keys divide it."""
COST_CLASSES = tl.constexpr(256)
WHOLE_CONTEXT = tl.constexpr(1 << 30)
"""Keys of a tile that is all of a row's."""


@triton.jit
def common_kernel(
    row_slot, seq_lens, num_single, block_tables, table_stride, common,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """common[row] = how many first tokens, in whole UNITs, have the same blocks as in the row before; one row each.

    At least one token of each of the two rows stays out. UNIT is a multiple of BLOCK_SIZE. CHUNK: blocks per look.
    """
    row = tl.program_id(0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = 0
    if (row > 0) & (row < tl.load(num_single)):
        length = tl.minimum(tl.load(seq_lens + row), tl.load(seq_lens + row - 1))
        limit = (length - 1) // UNIT * (UNIT // BLOCK_SIZE)
        mine = block_tables + tl.load(row_slot + row).to(tl.int64) * table_stride
        before = block_tables + tl.load(row_slot + row - 1).to(tl.int64) * table_stride
        equal = 0
        start = 0
        while start < limit:
            blocks = start + tl.arange(0, CHUNK)
            inside = blocks < limit
            a = tl.load(mine + blocks, mask=inside, other=-1)
            b = tl.load(before + blocks, mask=inside, other=-2)
            equal = tl.min(tl.where(a == b, start + CHUNK, blocks))
            start = tl.where(equal == start + CHUNK, start + CHUNK, limit)
        tokens = equal // (UNIT // BLOCK_SIZE) * UNIT
    tl.store(common + row, tokens)


@triton.jit
def _rows_at(ends, targets, count, STEPS: tl.constexpr):
    """For each target the first row whose end is larger; count where none is. ends: [≥ count] ascending."""
    low = tl.zeros_like(targets)
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        end = tl.load(ends + middle, mask=open_, other=0)
        right = open_ & (end <= targets)
        low = tl.where(right, middle + 1, low)
        high = tl.where(open_ & (end > targets), middle, high)
    return low


@triton.jit
def decode_plan_kernel(
    row_slot, seq_lens, num_single, common,
    programs, split, ends, shared_lens, shared_chunks,
    run_first, run_common, run_rows, items, num_items, max_items, num_programs, min_tiles, shared_programs,
    KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, PROGRAM_LANES: tl.constexpr,
    ROW_LANES: tl.constexpr, ROW_STEPS: tl.constexpr,
    SHARED: tl.constexpr, MIN_SHARED: tl.constexpr, MIN_SHARERS: tl.constexpr, CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr, TOKENS: tl.constexpr, MAX_TILES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Plan of decode.py for num_programs programs; with SHARED also the items of the shared parts. One program.

    split: [3] tiles per program; how many programs, the first, have one more; keys of a tile. ends: [ROW_LANES]
    scratch, prefix sums of the rows' tiles. run_…: [ROW_LANES] scratch. MAX_TILES: where there are more in all, a
    row's whole context is one tile (0: never). Lets no kernel start early: stream.py reads the plan before it waits.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    count = tl.load(num_single)
    rows = tl.arange(0, ROW_LANES)
    lengths = tl.load(seq_lens + rows, mask=rows < count, other=0)
    first_tile = tl.zeros_like(lengths)
    if WINDOW > 0:
        first_tile = tl.maximum(lengths - WINDOW, 0) // BLOCK_N
    if SHARED:
        shared = _plan_shared(
            rows, count, row_slot, common, shared_lens, shared_chunks, run_first, run_common, run_rows,
            items, num_items, max_items, shared_programs,
            MIN_SHARED, MIN_SHARERS, CHUNK, MAX_CHUNKS, TOKENS, KV_HEADS,
        )  # fmt: skip
        first_tile = shared // BLOCK_N
    tiles = (lengths + BLOCK_N - 1) // BLOCK_N - first_tile
    keys = BLOCK_N
    if MAX_TILES > 0:
        fits = tl.sum(tiles) * KV_HEADS <= MAX_TILES
        tiles = tl.where(fits, tiles, tl.minimum(tiles, 1))
        keys = tl.where(fits, BLOCK_N, WHOLE_CONTEXT)
    tl.store(split + 2, keys)
    sums = tl.cumsum(tiles)
    tl.store(ends + rows, sums)
    total = tl.max(sums) * KV_HEADS
    busy = tl.minimum(tl.maximum(total // min_tiles, 1), num_programs)
    base = total // busy
    extra = total % busy
    tl.store(split, base)
    tl.store(split + 1, extra)
    tl.debug_barrier()
    program = tl.arange(0, PROGRAM_LANES)
    works = (program < busy) & (program * base + tl.minimum(program, extra) < total)
    first = tl.where(works, program * base + tl.minimum(program, extra), 0)
    last = tl.where(works, first + base + (program < extra).to(tl.int32) - 1, 0)
    row, tile, pair = _pair_at(ends, first, count, KV_HEADS, ROW_STEPS)
    _, _, last_pair = _pair_at(ends, last, count, KV_HEADS, ROW_STEPS)
    there = program < num_programs
    fields = programs + program * PROGRAM_FIELDS
    tl.store(fields, row, mask=there)
    tl.store(fields + 1, tile, mask=there)
    tl.store(fields + 2, tl.where(works, last_pair - pair + 1, 0), mask=there)
    tl.store(fields + 3, tl.load(seq_lens + row, mask=works, other=0), mask=there)
    tl.store(fields + 4, tl.load(row_slot + row, mask=works, other=0), mask=there)
    if SHARED:
        tl.store(fields + 5, tl.load(shared_lens + row, mask=works, other=0), mask=there)
    else:
        tl.store(fields + 5, tl.zeros_like(row), mask=there)


@triton.jit
def _pair_at(ends, numbers, count, KV_HEADS: tl.constexpr, STEPS: tl.constexpr):
    """Row, tile in the row, and index of the (row, head) pair of the tiles of these numbers."""
    row = tl.minimum(_rows_at(ends, numbers // KV_HEADS, count, STEPS), tl.maximum(count - 1, 0))
    start = tl.load(ends + row - 1, mask=row > 0, other=0)
    tiles = tl.maximum(tl.load(ends + row) - start, 1)
    tile = numbers - start * KV_HEADS
    return row, tile, row * KV_HEADS + tile // tiles


@triton.jit
def _plan_shared(
    rows, count, row_slot, common, shared_lens, shared_chunks, run_first, run_common, run_rows,
    items, num_items, max_items, shared_programs,
    MIN_SHARED: tl.constexpr, MIN_SHARERS: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Find the runs; store and return each row's shared tokens; make an item per TOKENS rows and chunk of keys.

    A run gets as many chunks as its items need to occupy shared_programs, if that leaves CHUNK keys in each.
    """
    live = rows < count
    alike = tl.load(common + rows, mask=live, other=0)
    starts = live & (alike < MIN_SHARED)
    run = tl.cumsum(starts.to(tl.int32)) - 1
    tl.store(run_common + rows, 0x7FFFFFFF)
    tl.store(run_rows + rows, 0)
    tl.store(run_first + run, rows, mask=starts)
    tl.debug_barrier()
    tl.atomic_min(run_common + run, alike, mask=live & ~starts, sem="relaxed")
    tl.atomic_add(run_rows + run, 1, mask=live, sem="relaxed")
    tl.debug_barrier()
    members = tl.load(run_rows + run, mask=live, other=0, cache_modifier=".cg")
    least = tl.load(run_common + run, mask=live, other=0, cache_modifier=".cg")
    shared = tl.where(live & (members >= MIN_SHARERS), least, 0)
    wanted = shared_programs // tl.maximum((members + TOKENS - 1) // TOKENS * KV_HEADS, 1)
    wanted = tl.maximum(tl.minimum(tl.minimum(wanted, MAX_CHUNKS), shared // CHUNK), 1)
    chunk = tl.maximum((shared // wanted + KEYS - 1) // KEYS * KEYS, 1)
    chunks = (shared + chunk - 1) // chunk
    tl.store(shared_lens + rows, shared, mask=live)
    tl.store(shared_chunks + rows, chunks, mask=live)
    first = tl.load(run_first + run, mask=live, other=0)
    leads = live & (shared > 0) & ((rows - first) % TOKENS == 0)
    made = tl.where(leads, chunks, 0)
    place = tl.cumsum(made) - made
    slot = tl.load(row_slot + rows, mask=leads, other=0)
    for index in tl.static_range(MAX_CHUNKS):
        mine = leads & (index < chunks) & (place + index < max_items)
        item = items + (place + index) * ITEM_FIELDS
        tl.store(item, rows, mask=mine)
        tl.store(item + 1, tl.minimum(first + members - rows, TOKENS), mask=mine)
        tl.store(item + 2, slot, mask=mine)
        tl.store(item + 3, index * chunk, mask=mine)
        tl.store(item + 4, tl.minimum((index + 1) * chunk, shared), mask=mine)
        tl.store(item + 5, tl.zeros_like(rows), mask=mine)
        tl.store(item + 6, tl.zeros_like(rows) + index, mask=mine)
    tl.store(num_items, tl.minimum(tl.sum(made), max_items))
    return shared


@triton.jit
def prefill_plan_kernel(
    row_slot, seq_lens, query_start, num_rows, num_single, ends, classes, items, num_items, max_items,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    ROW_LANES: tl.constexpr, ROW_STEPS: tl.constexpr, ITEM_LANES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Items of TOKENS queries of the rows with several, those with the most keys first. One program.

    ends: [ROW_LANES] and classes: [COST_CLASSES] int32 scratch. Items of one class of cost come in any order.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(num_rows)
    rows = tl.arange(0, ROW_LANES)
    multi = (rows >= tl.load(num_single)) & (rows < count)
    first_token = tl.load(query_start + rows, mask=multi, other=0)
    last_token = tl.load(query_start + rows + 1, mask=multi, other=0)
    sums = tl.cumsum((last_token - first_token + TOKENS - 1) // TOKENS)
    tl.store(ends + rows, sums)
    tl.store(classes + tl.arange(0, COST_CLASSES), tl.zeros([COST_CLASSES], tl.int32))
    total = tl.minimum(tl.max(sums), max_items)
    tl.store(num_items, total)
    tl.debug_barrier()
    item = tl.arange(0, ITEM_LANES)
    there = item < total
    row = _rows_at(ends, item, count, ROW_STEPS)
    start = tl.load(ends + row - 1, mask=there & (row > 0), other=0)
    token = tl.load(query_start + row, mask=there, other=0)
    after = tl.load(query_start + row + 1, mask=there, other=0)
    length = tl.load(seq_lens + row, mask=there, other=0)
    done = (item - start) * TOKENS
    tokens = tl.minimum(TOKENS, after - token - done)
    position = length - (after - token) + done
    end = position + tokens
    begin = tl.zeros_like(end)
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    cost = tl.where(there, end - begin, 0)
    most = tl.max(cost)
    width = most // COST_CLASSES + 1
    kind = tl.where(there, (most - cost) // width, 0)
    tl.atomic_add(classes + kind, 1, mask=there, sem="relaxed")
    tl.debug_barrier()
    sizes = tl.load(classes + tl.arange(0, COST_CLASSES), cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(classes + tl.arange(0, COST_CLASSES), tl.cumsum(sizes) - sizes)
    tl.debug_barrier()
    target = items + tl.atomic_add(classes + kind, 1, mask=there, sem="relaxed") * ITEM_FIELDS
    tl.store(target, token + done, mask=there)
    tl.store(target + 1, tokens, mask=there)
    tl.store(target + 2, tl.load(row_slot + row, mask=there, other=0), mask=there)
    tl.store(target + 3, begin, mask=there)
    tl.store(target + 4, end, mask=there)
    tl.store(target + 5, position, mask=there)
    tl.store(target + 6, tl.zeros_like(end), mask=there)
