"""Looking again at part of a row: only at groups of tokens whose maximum says that they can matter.

A limit is a pair (logit, id): the tokens `beyond` it are those of a larger logit, and of an equal one with a smaller
id. All tokens are beyond (−∞, NO_TOKEN).

What takes scalars and returns some is called, not inlined: otherwise Triton takes 15 seconds for the kernel, not 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    GROUP,
    LOG2_E,
    MAX_CANDIDATES,
    MAX_RANKED,
    NEG_INF,
    NO_TOKEN,
    beyond,
    first_of_race,
    first_tiles,
    firsts_of_race,
    float_of_key,
    gumbel,
    load_row,
    next_tiles,
    noise_of,
    order_key,
    scaled,
    tile_logits,
    token_key,
)

NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every token."""
DRAW_STAGES = tl.constexpr(3)
PASS_STAGES = tl.constexpr(4)
"""Tiles on their way, and one: a list of all groups is read by a single program, tile after tile."""
ROW_STAGES = tl.constexpr(6)
"""The same of a whole row, whose tiles are known ahead."""
_SLACK = tl.constexpr(1e-4)
"""By how much rounding may put a token's bid above what its group was taken to bid at most. What can win is scaled to
−30 … 0: no noise is above 27 (the least variate is 2⁻³² / GROUP), and the likeliest token's is at least −3. Quotients
are then off by 4e-6 (2 ulp), logarithms by 6e-6 (`_fast_log`), sums by 1e-6: 2.2e-5 between two bids. More costs next
to nothing: a group that is listed in vain is looked at."""
_LOWEST_FLOAT = tl.constexpr((-0x7F800001) >> 16)
"""Upper half of the order_key of −∞; with zeros below it stands for no number."""
_RANKED_AT_ONCE = tl.constexpr(32)
_RACES_AT_ONCE = tl.constexpr(256)
"""Groups that are asked at once for the bids of their four tokens with the most noise."""


@triton.constexpr_function
def stages_of(logits, stages):
    """Of a loop over tiles. With edits none: shared memory has no place for the words and logits that they look up."""
    return stages if len(logits) == 1 else 1


@triton.jit
def load_maxima(group_max_row, num_groups, PADDED_GROUPS: tl.constexpr):
    """(maximum of each group, its number); −∞ beyond their number."""
    lanes = tl.arange(0, PADDED_GROUPS)
    return tl.load(group_max_row + lanes, mask=lanes < num_groups, other=NEG_INF), lanes


@triton.jit
def collect_groups(target, chosen, groups):
    """Write the numbers of the chosen groups in order; how many there are."""
    tl.debug_barrier()  # readers of what stood there
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(target + places, groups, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit(noinline=True)
def list_groups(groups_row, group_max_row, num_groups, at_least, PADDED_GROUPS: tl.constexpr):
    """The list of the groups whose maximum reaches the logit `at_least`; how many there are."""
    maxima, lanes = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    return collect_groups(groups_row, (maxima >= at_least) & (lanes < num_groups), lanes)


@triton.jit(noinline=True)
def largest_maxima(group_max_row, num_groups, count, PADDED_GROUPS: tl.constexpr):
    """A logit that at least `count` groups reach, and hardly more: exact to 16 bits. −∞ where groups are too few.

    So at least `count` tokens reach it, and hardly more where groups are many.
    """
    maxima, lanes = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    keys = tl.where(lanes < num_groups, order_key(maxima) >> 16, -(2**15))
    low = tl.min(tl.where(lanes < num_groups, keys, 2**15), 0)
    high = tl.max(keys, 0) + 1
    reached = num_groups
    while (reached > count) & (high - low > 1):
        pivot = (low + high) >> 1
        at_pivot = tl.sum((keys >= pivot).to(tl.int32), 0)
        if at_pivot >= count:
            low = pivot
            reached = at_pivot
        else:
            high = pivot
    return tl.where((num_groups >= count) & (low > _LOWEST_FLOAT), float_of_key(low << 16), NEG_INF)


@triton.jit
def _load_groups(groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS: tl.constexpr):
    """(logits, token ids, mask, group numbers) of TILE_GROUPS groups of the list."""
    at = start + tl.arange(0, TILE_GROUPS)
    groups = tl.load(groups_row + at, mask=at < num_listed, other=0)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (columns < vocab_size) & (at < num_listed)[:, None]
    return load_row(logits, columns, mask), columns, mask, groups


@triton.jit(noinline=True)
def count_beyond(groups_row, num_listed, logits, vocab_size, limit, limit_id, TILE_GROUPS: tl.constexpr):
    """How many of the listed tokens are beyond the limit."""
    total = tl.zeros((TILE_GROUPS, GROUP), tl.int32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=stages_of(logits, PASS_STAGES)):
        x, columns, mask, _ = _load_groups(groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS)
        total += (beyond(x, columns, limit, limit_id) & mask).to(tl.int32)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(noinline=True)
def mass_beyond(
    groups_row, num_listed, logits, vocab_size, best, inverse, limit, limit_id, TILE_GROUPS: tl.constexpr
):
    """Σ exp((x − best) · inverse) of the listed tokens beyond the limit."""
    total = tl.zeros((TILE_GROUPS, GROUP), tl.float32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=stages_of(logits, PASS_STAGES)):
        x, columns, _, _ = _load_groups(groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS)
        mass = tl.exp2((x - best) * (inverse * LOG2_E))  # 0 where masked: x is −∞
        total += tl.where(beyond(x, columns, limit, limit_id), mass, 0.0)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(noinline=True)
def mass_of_row(logits, vocab_size, best, inverse, limit, limit_id, TILE: tl.constexpr):
    """As mass_beyond, of the whole row: where most groups would be listed.

    Every full tile compares with one number: tokens before limit_id also count where they equal the limit.
    """
    scale = inverse * LOG2_E
    below = float_of_key(tl.where(limit == 0.0, -2, order_key(limit) - 1))  # −1 is −0
    lanes = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    full = vocab_size // TILE * TILE
    if len(logits) == 1:
        for start in tl.range(0, full, TILE, num_stages=ROW_STAGES):
            x = tl.load(logits[0] + start + lanes).to(tl.float32)
            reach = tl.where(start + TILE <= limit_id, below, limit)
            total += tl.where(x > reach, tl.exp2((x - best) * scale), 0.0)
    else:
        following, later = first_tiles(logits, 0, vocab_size, full // TILE, TILE)
        for tile in range(full // TILE):
            start = tile * TILE
            x = tile_logits(following, TILE)
            following, later = next_tiles(logits, following, later, 0, tile, vocab_size, full // TILE, TILE)
            reach = tl.where(start + TILE <= limit_id, below, limit)
            total += tl.where(x > reach, tl.exp2((x - best) * scale), 0.0)
    columns = full + lanes
    x = load_row(logits, columns, columns < vocab_size)
    total += tl.where(beyond(x, columns, limit, limit_id), tl.exp2((x - best) * scale), 0.0)
    columns = limit_id // TILE * TILE + lanes  # the tile of the limit, in which some that equal it count
    x = load_row(logits, columns, columns < tl.minimum(limit_id, full))
    total += tl.where(x == limit, tl.exp2((x - best) * scale), 0.0)
    return tl.sum(total, 0)


@triton.jit(noinline=True)
def _draw_among_listed(
    groups_row, num_listed, logits, vocab_size, best, temperature, limit, limit_id, factor, offset,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner of the draw among listed tokens beyond the limit: (bid, token, logit); −∞ and NO_TOKEN without any."""
    bids = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    token = tl.full((TILE_GROUPS, GROUP), NO_TOKEN, tl.int32)
    logit = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=stages_of(logits, DRAW_STAGES)):
        x, columns, mask, groups = _load_groups(
            groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS
        )
        noise = noise_of(columns, groups[:, None], factor, offset)
        counted = mask & beyond(x, columns, limit, limit_id)
        bid = tl.where(counted, scaled(x, best, temperature) + noise, NEG_INF)
        token = tl.where(bid > bids, columns, token)
        logit = tl.where(bid > bids, x, logit)
        bids = tl.maximum(bids, bid)
    highest = tl.max(tl.max(bids, 1), 0)
    winner = tl.min(tl.min(tl.where(bids == highest, token, NO_TOKEN), 1), 0)
    return highest, winner, tl.max(tl.max(tl.where(token == winner, logit, NEG_INF), 1), 0)


@triton.jit
def _bid_of(variate, place, groups, there, logits, vocab_size, best, temperature, limit, limit_id):
    """(bid, token, logit) of one token per group: the one at that place, whose variate is known."""
    columns = groups * GROUP + place
    x = load_row(logits, columns, there & (columns < vocab_size))
    counted = there & beyond(x, columns, limit, limit_id)
    return tl.where(counted, scaled(x, best, temperature) + gumbel(variate), NEG_INF), columns, x


@triton.jit
def _better(bid, token, logit, other_bid, other_token, other_logit):
    """Of two bids the higher one."""
    wins = other_bid > bid
    token = tl.where(wins, other_token, token)
    return tl.where(wins, other_bid, bid), token, tl.where(wins, other_logit, logit)


@triton.jit(noinline=True)
def _first_bids(
    groups_row, num_listed, group_max_row, logits, vocab_size,
    best, temperature, limit, limit_id, reached, factor, offset,
):  # fmt: skip
    """The best bid of the four tokens with the most noise of each listed group: (bid, token, logit).

    Keeps of the list the groups whose largest logit, with less noise than theirs, would bid as much; how many.
    """
    lanes = tl.arange(0, _RACES_AT_ONCE)
    bid = tl.full((_RACES_AT_ONCE,), NEG_INF, tl.float32)
    token = tl.full((_RACES_AT_ONCE,), NO_TOKEN, tl.int32)
    logit = tl.full((_RACES_AT_ONCE,), NEG_INF, tl.float32)
    num_kept = num_listed * 0
    for start in range(0, num_listed, _RACES_AT_ONCE):
        there = start + lanes < num_listed
        groups = tl.load(groups_row + start + lanes, mask=there, other=0)
        maxima = tl.load(group_max_row + groups, mask=there, other=NEG_INF)
        a, b, c, d, place_a, place_b, place_c, place_d = firsts_of_race(groups, factor, offset)
        for k in tl.static_range(4):
            variate = (a, b, c, d)[k]
            place = (place_a, place_b, place_c, place_d)[k]
            its_bid, its_token, its_logit = _bid_of(
                variate, place, groups, there, logits, vocab_size, best, temperature, limit, limit_id
            )
            bid, token, logit = _better(bid, token, logit, its_bid, its_token, its_logit)
        reached = tl.maximum(reached, tl.max(bid, 0) - _SLACK)
        kept = there & (maxima >= limit) & (scaled(maxima, best, temperature) + gumbel(d) >= reached)
        num_kept += collect_groups(groups_row + num_kept, kept, groups)
    highest = tl.max(bid, 0)
    winner = tl.min(tl.where(bid == highest, token, NO_TOKEN), 0)
    return highest, winner, tl.max(tl.where(token == winner, logit, NEG_INF), 0), num_kept


@triton.jit(noinline=True)
def draw_beyond(
    groups_row, group_max_row, num_groups, logits, vocab_size, best, temperature, limit, limit_id, factor, offset,
    TILE_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner of the draw among the tokens beyond the limit: (token, its logit); NO_TOKEN where there is none.

    A token's bid is its scaled logit and its noise. The four tokens of a group with the most noise are known without
    looking at the others. The best bid of the first ones is a bound from below, and the group's largest logit with
    their noise bounds what the group can bid. Few groups may bid more with the first one's noise, and those are asked
    for all four; hardly any may with less, and those are looked at as a whole.
    """
    maxima, lanes = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    variate, place = first_of_race(lanes, factor, offset)
    may_bid = (maxima >= limit) & (maxima > NEG_INF) & (lanes < num_groups)
    bids, _, _ = _bid_of(
        variate, place, lanes, may_bid, logits, vocab_size, best, temperature, limit, limit_id
    )
    reached = tl.max(bids, 0) - _SLACK
    chosen = may_bid & (scaled(maxima, best, temperature) + gumbel(variate) >= reached)
    num_listed = collect_groups(groups_row, chosen, lanes)
    bid, token, logit, num_kept = _first_bids(
        groups_row, num_listed, group_max_row, logits, vocab_size,
        best, temperature, limit, limit_id, reached, factor, offset,
    )  # fmt: skip
    other_bid, other_token, other_logit = _draw_among_listed(
        groups_row, num_kept, logits, vocab_size, best, temperature, limit, limit_id, factor, offset, TILE_GROUPS
    )  # fmt: skip
    _, token, logit = _better(bid, token, logit, other_bid, other_token, other_logit)
    return token, logit


@triton.jit
def first_of_largest(maxima, lanes, best, logits, vocab_size):
    """The lowest id of the tokens with the logit `best`, the largest."""
    group = tl.min(tl.where(maxima == best, lanes, NO_TOKEN), 0)
    columns = group * GROUP + tl.arange(0, GROUP)
    x = load_row(logits, columns, columns < vocab_size)
    return tl.min(tl.where(x == best, columns, NO_TOKEN), 0)


@triton.jit(noinline=True)
def largest_below(groups_row, num_listed, logits, vocab_size, below, TILE_GROUPS: tl.constexpr):
    """The largest key of a listed token that is smaller than `below`."""
    largest = tl.full((TILE_GROUPS, GROUP), NO_KEY, tl.int64)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=stages_of(logits, DRAW_STAGES)):
        x, columns, mask, _ = _load_groups(groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS)
        key = token_key(x, columns)
        largest = tl.maximum(largest, tl.where(mask & (key < below), key, NO_KEY))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit(noinline=True)
def gather_candidates(
    groups_row, num_listed, logits, vocab_size, at_least, candidate_logit, candidate_token, TILE_GROUPS: tl.constexpr
):  # fmt: skip
    """Write logits and ids of the listed tokens that reach the logit `at_least`.

    How many there are; only the first MAX_CANDIDATES are written.
    """
    count = num_listed * 0
    for start in range(0, num_listed, TILE_GROUPS):
        x, columns, mask, _ = _load_groups(groups_row, start, num_listed, logits, vocab_size, TILE_GROUPS)
        flat = tl.ravel((mask & (x >= at_least)).to(tl.int32))
        places = count + tl.cumsum(flat, 0) - 1
        written = (flat > 0) & (places < MAX_CANDIDATES)
        tl.store(candidate_logit + places, tl.ravel(x), mask=written)
        tl.store(candidate_token + places, tl.ravel(columns), mask=written)
        count += tl.sum(flat, 0)
    tl.debug_barrier()
    return count


@triton.jit
def load_candidates(candidate_logit, candidate_token, lanes, count):
    """(logit, token, key) of candidates; NO_TOKEN and NO_KEY beyond their number."""
    mask = lanes < count
    x = tl.load(candidate_logit + lanes, mask=mask, other=NEG_INF)
    token = tl.load(candidate_token + lanes, mask=mask, other=NO_TOKEN)
    return x, token, tl.where(mask, token_key(x, token), NO_KEY)


@triton.jit
def rank_candidates(candidate_logit, candidate_token, key, count, best, temperature):
    """For MAX_RANKED keys: how many candidates come before each, and their Σ exp(scaled logit): all pairs compared."""
    before = tl.zeros((MAX_RANKED,), tl.int32)
    mass_before = tl.zeros((MAX_RANKED,), tl.float32)
    for start in range(0, count, _RANKED_AT_ONCE):
        lanes = start + tl.arange(0, _RANKED_AT_ONCE)
        x, _, other_key = load_candidates(candidate_logit, candidate_token, lanes, count)
        mass = tl.exp(scaled(x, best, temperature))
        precedes = other_key[None, :] > key[:, None]
        before += tl.sum(precedes.to(tl.int32), 1)
        mass_before += tl.sum(tl.where(precedes, mass[None, :], 0.0), 1)
    return before, mass_before
