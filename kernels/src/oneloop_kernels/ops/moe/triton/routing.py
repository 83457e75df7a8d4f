"""Which experts a token goes to, and the tokens of each expert side by side: all of it in one kernel.

A batch of few tokens is spread over many programs, each with whole rows of the router and one token; who comes last of a
token's programs chooses its experts. Of more tokens each program has some, with all of the router. In both, the last
program of all puts the tokens' experts in order, for which integers are counted: no result depends on who was first.

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
def route_few_kernel(
    x_ptr, norm_ptr, router_ptr, slots_ptr, statistics_ptr, hidden_ptr, logits_ptr, ids_ptr, weights_ptr, ranks_ptr,
    pairs_ptr, tiles_ptr, counters_ptr, num_tokens, num_slots, x_stride, eps,
    HAS_SLOTS: tl.constexpr, HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_ROWS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Norm, logits, choice and order of few tokens. Grid: [ceil(NUM_ROWS / BLOCK_E), num_tokens].

    NUM_ROWS: of the router. hidden: [num_tokens, HIDDEN] takes norm(x). logits: [num_tokens, NUM_ROWS] float32. ids
    (int32, −1 for padding), weights (float32) and ranks (int32): [num_tokens, TOP_K]. pairs, tiles: see `_order`.
    """
    part, token = tl.program_id(0), tl.program_id(1)
    num_parts = tl.num_programs(0)
    rows = part * BLOCK_E + tl.arange(0, BLOCK_E)
    columns = tl.arange(0, HIDDEN_PAD)
    within = columns < HIDDEN
    router = tl.load(
        router_ptr + rows[:, None] * HIDDEN + columns[None, :],
        mask=(rows < NUM_ROWS)[:, None] & within[None, :],
        other=0.0,
    )
    scale = tl.load(norm_ptr + columns, mask=within, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + columns, mask=within, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x) / HIDDEN + eps)
    hidden = (x * inverse).to(scale.dtype) * scale
    slice_size = tl.cdiv(HIDDEN, num_parts)
    mine = within & (columns >= part * slice_size) & (columns < (part + 1) * slice_size)
    tl.store(hidden_ptr + token.to(tl.int64) * HIDDEN + columns, hidden, mask=mine)
    logits = tl.sum(router.to(tl.float32) * hidden.to(tl.float32)[None, :], 1)
    tl.store(logits_ptr + token * NUM_ROWS + rows, logits, mask=rows < NUM_ROWS)
    tl.debug_barrier()  # all of them are written before the ticket is taken
    ticket_ptr = counters_ptr + NUM_EXPERTS + 1 + token
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == num_parts - 1:
        tl.store(ticket_ptr, 0)
        experts = tl.arange(0, EXPERTS_PAD)
        all_logits = tl.load(
            logits_ptr + token * NUM_ROWS + experts,
            mask=experts < NUM_EXPERTS,
            other=float("-inf"),
            cache_modifier=".cg",  # others wrote while we ran
        )
        tokens = token + tl.arange(0, 1)
        _choose(
            all_logits[None, :], tokens, slots_ptr, ids_ptr, weights_ptr, ranks_ptr, counters_ptr,
            num_tokens, num_slots, HAS_SLOTS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED,
        )  # fmt: skip
        _order_if_last(
            ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_tokens, num_tokens,
            HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, BLOCK_M, BLOCK_PAIRS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def route_kernel(
    x_ptr, norm_ptr, router_ptr, slots_ptr, statistics_ptr, hidden_ptr, logits_ptr, ids_ptr, weights_ptr, ranks_ptr,
    pairs_ptr, tiles_ptr, counters_ptr, num_tokens, num_slots, x_stride, eps,
    HAS_SLOTS: tl.constexpr, HAS_STATISTICS: tl.constexpr, NUM_EXPERTS: tl.constexpr, NUM_ROWS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The same for many tokens. Grid: [ceil(num_tokens / BLOCK_T)]. EXPERTS_PAD ≥ NUM_ROWS.

    logits takes only the shared gate's row. BLOCK_PAIRS 0: pairs are left to `scatter_kernel`.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = tokens < num_tokens
    experts = tl.arange(0, EXPERTS_PAD)
    x_rows = x_ptr + tokens.to(tl.int64) * x_stride
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        mask = live[:, None] & (columns < HIDDEN)[None, :]
        x = tl.load(x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    inverse = tl.rsqrt(tl.sum(squares, 1) / HIDDEN + eps)
    logits = tl.zeros([EXPERTS_PAD, BLOCK_T], tl.float32)
    for start in range(0, HIDDEN, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        within = columns < HIDDEN
        mask = live[:, None] & within[None, :]
        x = tl.load(x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(norm_ptr + columns, mask=within, other=0.0)
        router = tl.load(
            router_ptr + experts[:, None] * HIDDEN + columns[None, :],
            mask=(experts < NUM_ROWS)[:, None] & within[None, :],
            other=0.0,
        )
        hidden = (x * inverse[:, None]).to(scale.dtype) * scale[None, :]
        tl.store(
            hidden_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns[None, :], hidden, mask=mask
        )
        logits = tl.dot(router, tl.trans(hidden), logits, input_precision="ieee")
    if NUM_ROWS > NUM_EXPERTS:
        gate = tl.sum(tl.where((experts == NUM_EXPERTS)[:, None], logits, 0.0), 0)
        tl.store(logits_ptr + tokens * NUM_ROWS + NUM_EXPERTS, gate, mask=live)
    logits = tl.where((experts < NUM_EXPERTS)[:, None], logits, float("-inf"))
    _choose(
        tl.trans(logits), tokens, slots_ptr, ids_ptr, weights_ptr, ranks_ptr, counters_ptr,
        num_tokens, num_slots, HAS_SLOTS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, TOP_K_PAD, RENORMALISED,
    )  # fmt: skip
    _order_if_last(
        ids_ptr, ranks_ptr, statistics_ptr, pairs_ptr, tiles_ptr, counters_ptr, num_tokens, tl.num_programs(0),
        HAS_STATISTICS, NUM_EXPERTS, EXPERTS_PAD, TOP_K, BLOCK_M, BLOCK_PAIRS,
    )  # fmt: skip


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
    logits, tokens, slots_ptr, ids_ptr, weights_ptr, ranks_ptr, counters_ptr, num_tokens, num_slots,
    HAS_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    """Write the ids and weights of the tokens' experts, count them, and write how many were counted before.

    logits: [tokens, EXPERTS_PAD] float32, −∞ beyond the experts.
    """
    experts = tl.arange(0, EXPERTS_PAD)[None, :]
    logits = tl.where(logits == logits, logits, float("-inf")) + 0.0  # + 0: so that −0 equals 0
    bits = logits.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & SIGN_CLEARED)
    keys = (ordered.to(tl.int64) << 32) | (EXPERTS_PAD - 1 - experts).to(tl.int64)
    keys = tl.where(experts < NUM_EXPERTS, keys, LOWEST)
    largest = tl.max(logits, 1)
    places = tl.arange(0, TOP_K_PAD)[None, :]
    ids = tl.zeros([tokens.shape[0], TOP_K_PAD], tl.int32)
    weights = tl.zeros([tokens.shape[0], TOP_K_PAD], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], LOWEST, keys)
        expert = (EXPERTS_PAD - 1 - (best & LOW_WORD)).to(tl.int32)
        word = (best >> 32).to(tl.int32)
        logit = (word ^ ((word >> 31) & SIGN_CLEARED)).to(tl.float32, bitcast=True)
        ids = tl.where(places == place, expert[:, None], ids)
        weights = tl.where(places == place, tl.exp(logit - largest)[:, None], weights)
    total = tl.sum(weights, 1) if RENORMALISED else tl.sum(tl.exp(logits - largest[:, None]), 1)
    weights /= total[:, None]
    live = tokens < num_tokens
    if HAS_SLOTS:
        live &= tl.load(slots_ptr + tokens, mask=tokens < num_slots, other=-1) >= 0
    chosen = (places < TOP_K) & live[:, None]
    ranks = tl.atomic_add(counters_ptr + ids, 1, mask=chosen, sem="relaxed")
    targets = tokens[:, None] * TOP_K + places
    written = (places < TOP_K) & (tokens < num_tokens)[:, None]
    tl.store(ids_ptr + targets, tl.where(live[:, None], ids, -1), mask=written)
    tl.store(weights_ptr + targets, weights, mask=written)
    tl.store(ranks_ptr + targets, ranks, mask=chosen)


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
    """pairs: [num_pairs] int32, the index token · top_k + place of every pair of token and expert, by expert.

    tiles: int32 [EXPERTS_PAD + 1 + 3 · tiles]: the first of each expert's pairs; the number of tiles; then of each tile
    the expert, its first pair, and where its pairs end. A tile has up to BLOCK_M pairs of one expert.
    """
    experts = tl.arange(0, EXPERTS_PAD)
    within = experts < NUM_EXPERTS
    counts = tl.load(counters_ptr + experts, mask=within, other=0, cache_modifier=".cg")
    tl.store(counters_ptr + experts, 0, mask=within)
    if HAS_STATISTICS:
        before = tl.load(statistics_ptr + experts, mask=within, other=0)
        tl.store(statistics_ptr + experts, before + counts, mask=within)
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
    if BLOCK_PAIRS > 0:
        tl.debug_barrier()  # the firsts are written
        for start in range(0, num_pairs, BLOCK_PAIRS):
            _scatter(start, ids_ptr, ranks_ptr, pairs_ptr, tiles_ptr, num_pairs, BLOCK_PAIRS)


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
