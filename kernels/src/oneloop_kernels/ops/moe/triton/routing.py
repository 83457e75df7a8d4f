"""Which experts a token goes to, and where there are many tokens, the pairs of each expert side by side: in one kernel.

A program has a block of tokens and a slice of the hidden size, of which it knows the logits' share; who comes last of
a block's programs adds them up and chooses. Few tokens need no more: the kernels of the experts find their pairs in the
choices. Of many, a pair's place among its expert's is counted atomically, and the last program of all writes the table
of tiles: integers, so that no result depends on who was first.

Experts are chosen by integers that have the order of the logits, so that whatever these are (infinite, not a number),
top_k different experts come out.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(1 << 31))
"""Below all logits."""
SIGN_CLEARED = tl.constexpr(0x7FFFFFFF)
TABLE = tl.constexpr(4)
"""Where the entries of the table of tiles begin: behind their number, at 16 bytes."""


@triton.jit(do_not_specialize=["num_flags", "num_tokens", "num_slots"])
def route_kernel(
    x_ptr, norm_ptr, router_ptr, slots_ptr, statistics_ptr, hidden_ptr, logits_ptr, ids_ptr, weights_ptr,
    bins_ptr, tiles_ptr, flags_ptr, counters_ptr, num_flags, num_tokens, num_slots, x_stride, eps,
    HAS_SLOTS: tl.constexpr, HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_ROWS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    FEW: tl.constexpr, BLOCK_M: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Norm, logits, choice; unless FEW the order too. Grid: [ceil(num_tokens / BLOCK_T) · SPLITS].

    hidden: [num_tokens, HIDDEN] takes norm(x). logits: float32 [SPLITS, num_tokens, EXPERTS_PAD], EXPERTS_PAD at least
    NUM_ROWS (of the router), takes shares, then in the first the shared gate's logits. ids (int32, −1 for padding) and
    weights (float32): [num_tokens, TOP_K]. bins: int32 [NUM_EXPERTS, num_tokens] takes each expert's pairs, by the
    index token · TOP_K + place. tiles: see `_write_tiles`. flags: int32 [num_flags] takes zeros. BLOCK_K: columns of a
    product; where it is a split's slice, the router is asked for before the kernel's turn.
    """
    SLICE: tl.constexpr = (HIDDEN + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < num_tokens
    experts = tl.arange(0, EXPERTS_PAD)
    router_rows = router_ptr + experts[:, None] * HIDDEN
    has_row = (experts < NUM_ROWS)[:, None]
    columns = split * SLICE + tl.arange(0, BLOCK_K)
    if SLICE == BLOCK_K:
        router = tl.load(
            router_rows + columns[None, :], mask=has_row & (columns < HIDDEN)[None, :], other=0.0
        )
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) == 0:
        for start in range(0, num_flags, BLOCK_H):
            flags = start + tl.arange(0, BLOCK_H)
            tl.store(flags_ptr + flags, 0, mask=flags < num_flags)
    x_rows = x_ptr + tokens.to(tl.int64) * x_stride
    inverse = tl.rsqrt(_squares(x_rows, live, HIDDEN, BLOCK_T, BLOCK_H) / HIDDEN + eps)
    logits = tl.zeros([EXPERTS_PAD, BLOCK_T], tl.float32)
    for start in range(0, SLICE, BLOCK_K):
        here = columns + start
        within = here < HIDDEN
        if SLICE != BLOCK_K:
            router = tl.load(router_rows + here[None, :], mask=has_row & within[None, :], other=0.0)
        mask = live[:, None] & within[None, :]
        x = tl.load(x_rows[:, None] + here[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(norm_ptr + here, mask=within, other=0.0)
        hidden = (x * inverse[:, None]).to(scale.dtype) * scale[None, :]
        tl.store(hidden_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + here[None, :], hidden, mask=mask)
        logits = tl.dot(router, tl.trans(hidden), logits, input_precision="ieee")
    shares = logits_ptr + tokens[:, None] * EXPERTS_PAD + experts[None, :]
    tl.store(shares + split * num_tokens * EXPERTS_PAD, tl.trans(logits), mask=live[:, None])
    tl.debug_barrier()  # all of the shares are written before the ticket is taken
    is_last = True
    if SPLITS > 1:
        ticket_ptr = counters_ptr + NUM_EXPERTS + 1 + block
        is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.store(counters_ptr + NUM_EXPERTS + 1 + block, 0)
        total = tl.zeros([BLOCK_T, EXPERTS_PAD], tl.float32)
        for share in tl.static_range(SPLITS):  # past the first-level cache: others wrote while we ran
            place = shares + share * num_tokens * EXPERTS_PAD
            total += tl.load(place, mask=live[:, None], other=0.0, cache_modifier=".cg")
        if NUM_ROWS > NUM_EXPERTS:
            tl.store(shares, total, mask=live[:, None] & (experts == NUM_EXPERTS)[None, :])
        total = tl.where((experts < NUM_EXPERTS)[None, :], total, float("-inf"))
        written = live
        if HAS_SLOTS:
            live &= tl.load(slots_ptr + tokens, mask=tokens < num_slots, other=-1) >= 0
        ids, weights = _choose(total, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED)
        places = tl.arange(0, TOP_K_PAD)[None, :]
        chosen = (places < TOP_K) & live[:, None]
        pairs = tokens[:, None] * TOP_K + places
        tl.store(ids_ptr + pairs, tl.where(live[:, None], ids, -1), mask=(places < TOP_K) & written[:, None])
        tl.store(weights_ptr + pairs, weights, mask=chosen)
        if HAS_STATISTICS:
            tl.atomic_add(statistics_ptr + ids, 1, mask=chosen, sem="relaxed")
        if not FEW:
            ranks = tl.atomic_add(counters_ptr + ids, 1, mask=chosen, sem="relaxed")
            tl.store(bins_ptr + ids * num_tokens + ranks, pairs, mask=chosen)
            # Counted before the ticket is taken. Who comes last counts the tiles.
            tl.debug_barrier()
            ticket_ptr = counters_ptr + NUM_EXPERTS
            if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) // SPLITS - 1:
                tl.store(ticket_ptr, 0)
                _write_tiles(tiles_ptr, counters_ptr, num_tokens, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M)


@triton.jit
def _squares(x_rows, live, HIDDEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Sums of squares of whole rows, [BLOCK_T]. Unrolled: all of a row is on its way at once."""
    squares = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        mask = live[:, None] & (columns < HIDDEN)[None, :]
        x = tl.load(x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sum(squares, 1)


@triton.jit
def _choose(
    logits,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    RENORMALISED: tl.constexpr,
):  # fmt: skip
    """logits: [tokens, EXPERTS_PAD] float32, −∞ beyond the experts → ids and weights [tokens, TOP_K_PAD].

    The largest, and of equals the first, TOP_K times: maxima of 32-bit integers, which a warp takes in one instruction.
    """
    experts = tl.arange(0, EXPERTS_PAD)[None, :]
    logits = tl.where(logits == logits, logits, float("-inf")) + 0.0  # + 0: so that −0 equals 0
    ordered = _mirrored(logits.to(tl.int32, bitcast=True))
    ordered = tl.where(experts < NUM_EXPERTS, ordered, TAKEN)
    places = tl.arange(0, TOP_K_PAD)[None, :]
    ids = tl.zeros([logits.shape[0], TOP_K_PAD], tl.int32)
    chosen = tl.full([logits.shape[0], TOP_K_PAD], float("-inf"), tl.float32)
    largest = tl.zeros([logits.shape[0]], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(ordered, 1)
        expert = tl.min(tl.where(ordered == best[:, None], experts, EXPERTS_PAD), 1)
        ordered = tl.where(experts == expert[:, None], TAKEN, ordered)
        logit = _mirrored(best).to(tl.float32, bitcast=True)
        if place == 0:
            largest = logit
        ids = tl.where(places == place, expert[:, None], ids)
        chosen = tl.where(places == place, logit[:, None], chosen)
    weights = tl.where(places < TOP_K, tl.exp(chosen - largest[:, None]), 0.0)
    total = tl.sum(weights, 1) if RENORMALISED else tl.sum(tl.exp(logits - largest[:, None]), 1)
    return ids, weights / total[:, None]


@triton.jit
def _mirrored(bits):
    """Of a float32's bits integers in the order of the numbers, and the other way round."""
    return bits ^ ((bits >> 31) & SIGN_CLEARED)


@triton.jit
def _write_tiles(
    tiles_ptr, counters_ptr, num_tokens,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M pairs of one expert are a tile; counters are left zero.

    tiles: int32 [TABLE + 4 · tiles], 16 bytes apart: their number; then of each the expert, its first row and the row
    behind its last (of all pairs, by expert), and where in bins its first pair is.
    """
    experts = tl.arange(0, EXPERTS_PAD)
    within = experts < NUM_EXPERTS
    counts = tl.load(counters_ptr + experts, mask=within, other=0, cache_modifier=".cg")
    tl.store(counters_ptr + experts, 0, mask=within)
    num_tiles = tl.cdiv(counts, BLOCK_M)
    sums = tl.cumsum((num_tiles.to(tl.int64) << 32) + counts.to(tl.int64), 0)
    ends, last_tiles = (sums & 0x7FFFFFFF).to(tl.int32), (sums >> 32).to(tl.int32)
    tl.store(tiles_ptr, tl.sum(num_tiles, 0))
    table_ptr = tiles_ptr + TABLE + 4 * (last_tiles - num_tiles)
    for index in range(tl.max(num_tiles, 0)):
        here = index < num_tiles
        first = ends - counts + index * BLOCK_M
        tl.store(table_ptr + 4 * index, experts, mask=here)
        tl.store(table_ptr + 4 * index + 1, first, mask=here)
        tl.store(table_ptr + 4 * index + 2, tl.minimum(first + BLOCK_M, ends), mask=here)
        tl.store(table_ptr + 4 * index + 3, experts * num_tokens + index * BLOCK_M, mask=here)
