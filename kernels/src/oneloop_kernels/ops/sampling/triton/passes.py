"""Looking again at part of a row: only at groups of tokens whose maximum says that they can matter.

A limit is a pair (logit, id): the tokens `beyond` it are those of a larger logit, and of an equal one with a smaller
id. All tokens are beyond (−∞, NO_TOKEN).
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    GROUP,
    INF,
    LOG2_E,
    MAX_CANDIDATES,
    MAX_RANKED,
    NEG_INF,
    NO_TOKEN,
    beyond,
    float_of_key,
    group_race,
    largest_noise,
    load_row,
    noise_of,
    order_key,
    scaled,
    token_key,
)

NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every token."""
DRAW_STAGES = tl.constexpr(3)
PASS_STAGES = tl.constexpr(4)
"""Tiles on their way, and one: a list of all groups is read by a single program, tile after tile."""
_FIRST_BOUNDS = tl.constexpr(3.0)
"""How far below the highest bound those of the groups lie that are looked at first."""
_SLACK = tl.constexpr(1e-4)
"""By how much rounding may put a token's noise above the largest of its group."""
_LOWEST_FLOAT = tl.constexpr((-0x7F800001) >> 16)
"""Upper half of the order_key of −∞; with zeros below it stands for no number."""
_RANKED_AT_ONCE = tl.constexpr(32)


@triton.jit
def collect_groups(groups_row, chosen, lanes):
    """Write the numbers of the chosen groups, ascending; how many there are."""
    tl.debug_barrier()  # readers of the list before
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups_row + places, lanes, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def largest_maxima(maxima, lanes, count, num_groups):
    """A logit that at least `count` groups reach, and hardly more: exact to 16 bits. −∞ where groups are too few.

    So at least `count` tokens reach it, and hardly more where groups are many.
    """
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
def _load_groups(
    groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS: tl.constexpr
):
    """(logits, token ids, mask, group numbers) of TILE_GROUPS groups of the list."""
    at = start + tl.arange(0, TILE_GROUPS)
    groups = tl.load(groups_row + at, mask=at < num_listed, other=0)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (columns < vocab_size) & (at < num_listed)[:, None]
    return load_row(logits, edited, is_edited, columns, mask, EDITS), columns, mask, groups


@triton.jit
def total_beyond(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, inverse, limit, limit_id,
    MASS: tl.constexpr, EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Of the listed tokens beyond the limit: with MASS Σ exp((x − best) · inverse), else how many there are."""
    total = tl.zeros((TILE_GROUPS, GROUP), tl.float32 if MASS else tl.int32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=PASS_STAGES):
        x, columns, mask, _ = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        counted = beyond(x, columns, limit, limit_id)
        if MASS:  # where masked x is −∞, which has none
            total += tl.where(counted, tl.exp2((x - best) * (inverse * LOG2_E)), 0.0)
        else:
            total += (counted & mask).to(tl.int32)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _draw_among_listed(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, temperature, limit, limit_id, factor, offset,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner of the draw among listed tokens beyond the limit: (bid, token, logit); −∞ and NO_TOKEN without any."""
    bids = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    token = tl.full((TILE_GROUPS, GROUP), NO_TOKEN, tl.int32)
    logit = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=DRAW_STAGES):
        x, columns, mask, groups = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        least, place = group_race(groups, factor, offset)
        noise = noise_of(columns, least[:, None], place[:, None], factor, offset)
        counted = mask & beyond(x, columns, limit, limit_id)
        bid = tl.where(counted, scaled(x, best, temperature) + noise, NEG_INF)
        token = tl.where(bid > bids, columns, token)
        logit = tl.where(bid > bids, x, logit)
        bids = tl.maximum(bids, bid)
    highest = tl.max(tl.max(bids, 1), 0)
    winner = tl.min(tl.min(tl.where(bids == highest, token, NO_TOKEN), 1), 0)
    return highest, winner, tl.max(tl.max(tl.where(token == winner, logit, NEG_INF), 1), 0)


@triton.jit
def draw_beyond(
    groups_row, maxima, lanes, num_groups, logits, edited, is_edited, vocab_size,
    best, temperature, limit, limit_id, factor, offset,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner of the draw among the tokens beyond the limit: (token, its logit); NO_TOKEN where there is none.

    A token's bid is its scaled logit and its noise. In every group one token is known to have the largest noise: the
    best of their bids is a bound from below, and the group's largest logit with that noise bounds what the group can
    bid. Only groups that may win are looked at as a whole, first the few with the highest bounds.
    """
    least, place = group_race(lanes, factor, offset)
    noise = largest_noise(least)
    columns = lanes * GROUP + place
    x = load_row(logits, edited, is_edited, columns, columns < vocab_size, EDITS)
    bids = tl.where(beyond(x, columns, limit, limit_id), scaled(x, best, temperature) + noise, NEG_INF)
    may_bid = (maxima >= limit) & (maxima > NEG_INF) & (lanes < num_groups)
    bounds = tl.where(may_bid, scaled(maxima, best, temperature) + noise, NEG_INF)
    reached = tl.max(
        bids, 0
    )  # not to be compared with a token's bid: the same sum may be rounded otherwise there
    highest = best * 0.0 + NEG_INF
    token = limit_id * 0 + NO_TOKEN
    logit = best * 0.0 + NEG_INF
    upper = best * 0.0 + INF
    lower = tl.maximum(reached, tl.max(bounds, 0) - _FIRST_BOUNDS) - _SLACK
    for _ in range(2):
        chosen = may_bid & (bounds >= lower) & (bounds < upper)
        num_listed = collect_groups(groups_row, chosen, lanes)
        bid, bidder, its_logit = _draw_among_listed(
            groups_row, num_listed, logits, edited, is_edited, vocab_size,
            best, temperature, limit, limit_id, factor, offset, EDITS, TILE_GROUPS,
        )  # fmt: skip
        wins = (bid > highest) | ((bid == highest) & (bidder < token))
        token = tl.where(wins, bidder, token)
        logit = tl.where(wins, its_logit, logit)
        highest = tl.maximum(highest, bid)
        upper = lower
        lower = tl.maximum(highest, reached) - _SLACK
    return token, logit


@triton.jit
def first_of_largest(maxima, lanes, best, logits, edited, is_edited, vocab_size, EDITS: tl.constexpr):
    """The lowest id of the tokens with the logit `best`, the largest."""
    group = tl.min(tl.where(maxima == best, lanes, NO_TOKEN), 0)
    columns = group * GROUP + tl.arange(0, GROUP)
    x = load_row(logits, edited, is_edited, columns, columns < vocab_size, EDITS)
    return tl.min(tl.where(x == best, columns, NO_TOKEN), 0)


@triton.jit
def largest_below(groups_row, num_listed, logits, vocab_size, below, TILE_GROUPS: tl.constexpr):
    """The largest key of a listed token that is smaller than `below`."""
    largest = tl.full((TILE_GROUPS, GROUP), NO_KEY, tl.int64)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=DRAW_STAGES):
        x, columns, mask, _ = _load_groups(
            groups_row, start, num_listed, logits, logits, False, vocab_size, False, TILE_GROUPS
        )
        key = token_key(x, columns)
        largest = tl.maximum(largest, tl.where(mask & (key < below), key, NO_KEY))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def gather_candidates(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    at_least, candidate_logit, candidate_token,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Write logits and ids of the listed tokens that reach the logit `at_least`.

    How many there are; only the first MAX_CANDIDATES are written.
    """
    count = num_listed * 0
    for start in range(0, num_listed, TILE_GROUPS):
        x, columns, mask, _ = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
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
