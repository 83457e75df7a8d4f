"""Which experts a token goes to, and the tokens of each expert side by side: all of it in one kernel.

A program has a block of tokens and a slice of the hidden size, of which it knows the logits' share; who comes last of
a block's programs adds them up and chooses. Where all tokens are one block, it puts the pairs of token and expert in
order too, in its registers. Of more tokens the last program of all does, for which integers are counted: no result
depends on who was first.

Experts are chosen by integers that hold a logit above the expert's index, so that no two are equal, and whatever the
logits are (infinite, not a number), top_k different experts come out.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 63))
LOW_WORD = tl.constexpr((1 << 32) - 1)
SIGN_CLEARED = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def route_kernel(
    x_ptr, norm_ptr, router_ptr, slots_ptr, statistics_ptr, hidden_ptr, logits_ptr, ids_ptr, weights_ptr, ranks_ptr,
    pairs_ptr, tiles_ptr, counters_ptr, num_tokens, num_slots, x_stride, eps,
    HAS_SLOTS: tl.constexpr, HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_ROWS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    ONE_BLOCK: tl.constexpr, ONE_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Norm, logits, choice and order. Grid: [ceil(num_tokens / BLOCK_T) · SPLITS].

    hidden: [num_tokens, HIDDEN] takes norm(x). logits: float32 [SPLITS, num_tokens, EXPERTS_PAD], EXPERTS_PAD at least
    NUM_ROWS (of the router), takes shares, then in the first the shared gate's logits. ids (int32, −1 for padding),
    weights (float32) and ranks (int32): [num_tokens, TOP_K]. pairs, tiles: see `_order` and `_tiles_of`. BLOCK_K:
    columns of a product; where it is a split's slice, the router is asked for before the kernel's turn. BLOCK_PAIRS 0:
    pairs are left to `scatter_kernel`. ONE_BLOCK: all tokens are one block.
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
        if HAS_SLOTS:
            live &= tl.load(slots_ptr + tokens, mask=tokens < num_slots, other=-1) >= 0
        if ONE_BLOCK:
            _choose_and_order(
                total, tokens, live, statistics_ptr, ids_ptr, weights_ptr, ranks_ptr, pairs_ptr, tiles_ptr,
                num_tokens, HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED, BLOCK_T, BLOCK_M,
                ONE_TOKEN,
            )  # fmt: skip
        else:
            ids, weights, _ = _choose(total, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED)
            places = tl.arange(0, TOP_K_PAD)[None, :]
            chosen = (places < TOP_K) & live[:, None]
            ranks = tl.atomic_add(counters_ptr + ids, 1, mask=chosen, sem="relaxed")
            _write_choice(
                ids,
                weights,
                ranks,
                tokens,
                live,
                ids_ptr,
                weights_ptr,
                ranks_ptr,
                num_tokens,
                TOP_K,
                TOP_K_PAD,
            )
            _order_if_last(
                ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_tokens,
                tl.num_programs(0) // SPLITS,
                HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, BLOCK_M, BLOCK_PAIRS,
            )  # fmt: skip


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


@triton.jit(do_not_specialize=["num_pairs"])
def scatter_kernel(
    ids_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_pairs,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The last part of `_order`, spread over programs. Grid: [ceil(num_pairs / BLOCK)]."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    _scatter(tl.program_id(0) * BLOCK, ids_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_pairs, BLOCK)


@triton.jit
def _choose(
    logits,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    RENORMALISED: tl.constexpr,
):  # fmt: skip
    """logits: [tokens, EXPERTS_PAD] float32, −∞ beyond the experts → ids and weights [tokens, TOP_K_PAD], and for each
    expert 1 where it is one of the token's, [tokens, EXPERTS_PAD]."""
    experts = tl.arange(0, EXPERTS_PAD)[None, :]
    logits = tl.where(logits == logits, logits, float("-inf")) + 0.0  # + 0: so that −0 equals 0
    bits = logits.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & SIGN_CLEARED)
    keys = (ordered.to(tl.int64) << 32) | (EXPERTS_PAD - 1 - experts).to(tl.int64)
    keys = tl.where(experts < NUM_EXPERTS, keys, LOWEST)
    largest = tl.max(logits, 1)
    places = tl.arange(0, TOP_K_PAD)[None, :]
    ids = tl.zeros([logits.shape[0], TOP_K_PAD], tl.int32)
    weights = tl.zeros([logits.shape[0], TOP_K_PAD], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], LOWEST, keys)
        expert = (EXPERTS_PAD - 1 - (best & LOW_WORD)).to(tl.int32)
        word = (best >> 32).to(tl.int32)
        logit = (word ^ ((word >> 31) & SIGN_CLEARED)).to(tl.float32, bitcast=True)
        ids = tl.where(places == place, expert[:, None], ids)
        weights = tl.where(places == place, tl.exp(logit - largest)[:, None], weights)
    total = tl.sum(weights, 1) if RENORMALISED else tl.sum(tl.exp(logits - largest[:, None]), 1)
    taken = ((keys == LOWEST) & (experts < NUM_EXPERTS)).to(tl.int32)
    return ids, weights / total[:, None], taken


@triton.jit
def _write_choice(
    ids, weights, ranks, tokens, live, ids_ptr, weights_ptr, ranks_ptr, num_tokens,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
):  # fmt: skip
    places = tl.arange(0, TOP_K_PAD)[None, :]
    targets = tokens[:, None] * TOP_K + places
    written = (places < TOP_K) & (tokens < num_tokens)[:, None]
    tl.store(ids_ptr + targets, tl.where(live[:, None], ids, -1), mask=written)
    tl.store(weights_ptr + targets, weights, mask=written)
    tl.store(ranks_ptr + targets, ranks, mask=written)


@triton.jit
def _choose_and_order(
    logits, tokens, live, statistics_ptr, ids_ptr, weights_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_tokens,
    HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Everything for a batch that is one block: pairs of an expert stand in the order of their tokens."""
    ids, weights, taken = _choose(logits, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED)
    taken = tl.where(live[:, None], taken, 0)
    places = tl.arange(0, TOP_K_PAD)[None, :]
    own_ranks = tl.zeros([BLOCK_T, TOP_K_PAD], tl.int32)
    if ONE_TOKEN:  # whose experts have a pair and a tile each, in the order of their choice
        _count(tl.sum(taken, 0), statistics_ptr, HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD)
        tl.store(tiles_ptr + EXPERTS_PAD, tl.sum(tl.sum(taken, 0), 0))
        entries = tiles_ptr + EXPERTS_PAD + 1 + 3 * places + tokens[:, None] * 0
        first = (tokens == 0)[:, None] & (places < TOP_K)
        tl.store(entries, ids, mask=first)
        tl.store(entries + 1, own_ranks + places, mask=first)
        tl.store(entries + 2, own_ranks + places + 1, mask=first)
        tl.store(pairs_ptr + own_ranks + places, own_ranks + places, mask=first)
    else:
        own_ranks = _order_block(
            ids, taken, tokens, live, statistics_ptr, pairs_ptr, tiles_ptr,
            HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, BLOCK_T, BLOCK_M,
        )  # fmt: skip
    _write_choice(
        ids, weights, own_ranks, tokens, live, ids_ptr, weights_ptr, ranks_ptr, num_tokens, TOP_K, TOP_K_PAD
    )


@triton.jit
def _order_block(
    ids, taken, tokens, live, statistics_ptr, pairs_ptr, tiles_ptr,
    HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the pairs and tiles of the only block. Returns the ranks of its pairs, [BLOCK_T, TOP_K_PAD]."""
    ranks = tl.cumsum(taken, 0) - taken
    firsts = _tiles_of(
        tl.sum(taken, 0), statistics_ptr, tiles_ptr, HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M
    )
    experts, places = tl.arange(0, EXPERTS_PAD)[None, :], tl.arange(0, TOP_K_PAD)[None, :]
    own_ranks = tl.zeros([BLOCK_T, TOP_K_PAD], tl.int32)
    for place in tl.static_range(TOP_K):
        expert = tl.sum(tl.where(places == place, ids, 0), 1)
        here = experts == expert[:, None]
        rank = tl.sum(tl.where(here, ranks, 0), 1)
        target = tl.sum(tl.where(here, firsts[None, :], 0), 1) + rank
        tl.store(pairs_ptr + target, tokens * TOP_K + place, mask=live)
        own_ranks = tl.where(places == place, rank[:, None], own_ranks)
    return own_ranks


@triton.jit
def _order_if_last(
    ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_tokens, num_comers,
    HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    tl.debug_barrier()  # all of this program's choices are written before the ticket is taken
    ticket_ptr = counters_ptr + NUM_EXPERTS
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == num_comers - 1:
        tl.store(ticket_ptr, 0)
        _order(
            ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_tokens * TOP_K,
            HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit
def _order(
    ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_pairs,
    HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """pairs: [num_pairs] int32, the index token · top_k + place of every pair of token and expert, by expert."""
    experts = tl.arange(0, EXPERTS_PAD)
    within = experts < NUM_EXPERTS
    counts = tl.load(counters_ptr + experts, mask=within, other=0, cache_modifier=".cg")
    tl.store(counters_ptr + experts, 0, mask=within)
    _tiles_of(counts, statistics_ptr, tiles_ptr, HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, BLOCK_M)
    if BLOCK_PAIRS > 0:
        tl.debug_barrier()  # the firsts are written
        for start in range(0, num_pairs, BLOCK_PAIRS):
            _scatter(start, ids_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_pairs, BLOCK_PAIRS)


@triton.jit
def _tiles_of(
    counts, statistics_ptr, tiles_ptr,
    HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Where each expert's pairs begin, [EXPERTS_PAD], written with the tiles. counts: of pairs, [EXPERTS_PAD].

    tiles: int32 [EXPERTS_PAD + 1 + 3 · tiles]: the first of each expert's pairs; the number of tiles; then of each tile
    the expert, its first pair, and where its pairs end. A tile has up to BLOCK_M pairs of one expert.
    """
    experts = tl.arange(0, EXPERTS_PAD)
    _count(counts, statistics_ptr, HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD)
    ends = tl.cumsum(counts, 0)
    firsts = ends - counts
    tl.store(tiles_ptr + experts, firsts)
    num_tiles = tl.cdiv(counts, BLOCK_M)
    last_tiles = tl.cumsum(num_tiles, 0)
    tl.store(tiles_ptr + EXPERTS_PAD, tl.sum(num_tiles, 0))
    table_ptr = tiles_ptr + EXPERTS_PAD + 1 + 3 * (last_tiles - num_tiles)
    for index in range(tl.max(num_tiles, 0)):
        here = index < num_tiles
        first = firsts + index * BLOCK_M
        tl.store(table_ptr + 3 * index, experts, mask=here)
        tl.store(table_ptr + 3 * index + 1, first, mask=here)
        tl.store(table_ptr + 3 * index + 2, tl.minimum(first + BLOCK_M, ends), mask=here)
    return firsts


@triton.jit
def _count(
    counts, statistics_ptr, HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr
):
    """counts: [EXPERTS_PAD], added to what was counted before."""
    if HAS_STATISTICS:
        experts = tl.arange(0, EXPERTS_PAD)
        within = experts < NUM_EXPERTS
        before = tl.load(statistics_ptr + experts, mask=within, other=0)
        tl.store(statistics_ptr + experts, before + counts, mask=within)


@triton.jit
def _scatter(start, ids_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_pairs, BLOCK: tl.constexpr):
    """Put so many pairs in their places."""
    pairs = start + tl.arange(0, BLOCK)
    within = pairs < num_pairs
    ids = tl.load(ids_ptr + pairs, mask=within, other=-1, cache_modifier=".cg")
    live = ids >= 0
    ranks = tl.load(ranks_ptr + pairs, mask=live, other=0, cache_modifier=".cg")
    firsts = tl.load(tiles_ptr + ids, mask=live, other=0, cache_modifier=".cg")
    tl.store(pairs_ptr + firsts + ranks, pairs, mask=live)
