"""Drawing from part of a row: top_k, top_p and min_p without sorting it.

Tokens are ordered by `token_key` (logit, then lowest id), so every set of likeliest tokens is "all beyond a limit".
With top_k the candidates are gathered, and what each has before it is counted. Without, the winner of the unrestricted
draw is tested: if the tokens before it have less than top_p of the mass, it belongs to the nucleus, and as the winner
among more tokens than the nucleus it is the nucleus' winner too. If not, the nucleus lies before it, and the draw is
repeated there. A draw is accepted with probability ≥ top_p, so few rows need a second one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    GROUP,
    MAX_CANDIDATES,
    MAX_RANKED,
    MIN_P,
    NEG_INF,
    NO_TOKEN,
    TOP_K,
    TOP_P,
    float_of_key,
    limit_of_key,
    middle,
    noise_of,
    order_key,
    scaled,
    token_key,
)
from oneloop_kernels.ops.sampling.triton.passes import (
    count_beyond,
    draw_beyond,
    gather_candidates,
    largest_maxima,
    list_groups,
    load_candidates,
    mass_beyond,
    mass_of_row,
    rank_candidates,
)

_LOWEST_KEY = tl.constexpr(-0x7F800001 << 32)
"""At most the key of any token with −∞; its upper half still is the key of a float."""


@triton.jit
def _smallest_logit(best, temperature, least):
    """The smallest float whose scaled logit is ≥ least (≤ 0), by bisection: scaling is monotonic."""
    low, high = order_key(best * 0.0 + NEG_INF), order_key(best)
    while middle(low, high) > low:
        pivot = middle(low, high)
        if scaled(float_of_key(pivot), best, temperature) >= least:
            high = pivot
        else:
            low = pivot
    return float_of_key(high)


@triton.jit
def _winner(s, token, kept, factor, offset):
    """The candidate that wins the draw among those kept."""
    perturbed = tl.where(kept, s + noise_of(token, token // GROUP, factor, offset), NEG_INF)
    return tl.min(tl.where((perturbed == tl.max(perturbed, 0)) & kept, token, NO_TOKEN), 0)


@triton.jit(noinline=True)
def _draw_among_few(candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset):
    """The winner among at most MAX_RANKED candidates, which hold the top_k likeliest tokens of the row."""
    lanes = tl.arange(0, MAX_RANKED)
    x, token, key = load_candidates(candidate_logit, candidate_token, lanes, count)
    before, mass_before = rank_candidates(candidate_logit, candidate_token, key, count, best, temperature)
    s = scaled(x, best, temperature)
    kept = (before < top_k) & (lanes < count)
    if top_p < 1.0:
        kept &= mass_before < top_p * tl.sum(tl.where(kept, tl.exp(s), 0.0), 0)
    return _winner(s, token, kept, factor, offset)


@triton.jit(noinline=True)
def _draw_among_many(
    candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset
):
    """The same for at most MAX_CANDIDATES, by bisection of the keys."""
    lanes = tl.arange(0, MAX_CANDIDATES)
    x, token, key = load_candidates(candidate_logit, candidate_token, lanes, count)
    s = scaled(x, best, temperature)
    low = tl.min(tl.where(lanes < count, key, 2**63 - 1), 0)
    highest = tl.max(key, 0) + 1
    high = highest
    kept = count
    while kept > top_k:  # keys differ, so some threshold keeps exactly top_k
        pivot = middle(low, high)
        at_pivot = tl.sum((key >= pivot).to(tl.int32), 0)
        if at_pivot >= top_k:
            low = pivot
            kept = at_pivot
        else:
            high = pivot
    if top_p < 1.0:
        mass = tl.exp(s)
        wanted = top_p * tl.sum(tl.where(key >= low, mass, 0.0), 0)
        high = highest
        beyond_high = kept * 0  # keys from `high` on
        while kept - beyond_high > 1:  # what is kept reaches the mass, without the last it does not
            pivot = middle(low, high)
            above = key >= pivot
            at_pivot = tl.sum(above.to(tl.int32), 0)
            if tl.sum(tl.where(above, mass, 0.0), 0) >= wanted:
                low = pivot
                kept = at_pivot
            else:
                high = pivot
                beyond_high = at_pivot
    return _winner(s, token, (key >= low) & (lanes < count), factor, offset)


@triton.jit
def _limit_of_top_k(groups_row, num_listed, logits, vocab_size, best, top_k, PASS_GROUPS: tl.constexpr):
    """A limit that exactly top_k of the listed tokens are beyond, pass by pass."""
    high = token_key(best, 0)
    low = high * 0 + _LOWEST_KEY
    limit, limit_id = limit_of_key(low)
    count = top_k + 1
    while count != top_k:
        pivot = middle(low, high)
        limit, limit_id = limit_of_key(pivot)
        count = count_beyond(groups_row, num_listed, logits, vocab_size, limit, limit_id, PASS_GROUPS)
        if count >= top_k:
            low = pivot
        else:
            high = pivot
    return limit, limit_id


@triton.jit
def _mass_before(
    groups_row, group_max_row, num_groups, logits, vocab_size, best, inverse, logit, token,
    PASS_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Σ exp(scaled logit) of the tokens that come before one."""
    num_listed = list_groups(groups_row, group_max_row, num_groups, logit, PADDED_GROUPS)
    if num_listed * 4 > num_groups:
        mass = mass_of_row(logits, vocab_size, best, inverse, logit, token, PASS_GROUPS * GROUP)
    else:
        mass = mass_beyond(
            groups_row, num_listed, logits, vocab_size, best, inverse, logit, token, PASS_GROUPS
        )
    return mass


@triton.jit
def _draw_until_accepted(
    groups_row, group_max_row, num_groups, logits, vocab_size,
    best, temperature, top_p, whole_mass, limit, limit_id, factor, offset,
    TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner among the tokens beyond the limit, whose Σ exp(scaled logit) is whole_mass, that top_p keeps."""
    accepted = False
    token = limit_id
    while not accepted:
        drawn, logit = draw_beyond(
            groups_row, group_max_row, num_groups, logits, vocab_size,
            best, temperature, limit, limit_id, factor, offset, TILE_GROUPS, PADDED_GROUPS,
        )  # fmt: skip
        # After a rejection there is always a likelier token: some had mass.
        token = tl.where(drawn == NO_TOKEN, token, drawn)
        accepted = (top_p >= 1.0) | (drawn == NO_TOKEN)
        if not accepted:
            likelier = _mass_before(
                groups_row, group_max_row, num_groups, logits, vocab_size,
                best, 1.0 / temperature, logit, token, PASS_GROUPS, PADDED_GROUPS,
            )  # fmt: skip
            accepted = likelier < top_p * whole_mass
            limit = logit
            limit_id = token
    return token


@triton.jit(noinline=True)
def draw_random(
    floats, ints, groups_row, group_max_row, num_groups, candidate_logit, candidate_token, logits, vocab_size,
    best, temperature, whole_mass, factor, offset,
    TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The row's token. whole_mass: Σ exp(scaled logit) of all tokens, for slots with top_p alone."""
    top_k = tl.minimum(tl.load(ints + TOP_K), vocab_size)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    limit = best * 0.0 + NEG_INF
    limit_id = top_k * 0 + NO_TOKEN
    token = limit_id
    if min_p > 0.0:
        limit = _smallest_logit(best, temperature, tl.log(min_p))
    done = False
    if top_k > 0:
        at_least = tl.maximum(largest_maxima(group_max_row, num_groups, top_k, PADDED_GROUPS), limit)
        num_listed = list_groups(groups_row, group_max_row, num_groups, at_least, PADDED_GROUPS)
        count = gather_candidates(
            groups_row,
            num_listed,
            logits,
            vocab_size,
            at_least,
            candidate_logit,
            candidate_token,
            TILE_GROUPS,
        )
        done = count <= MAX_CANDIDATES
        if count <= MAX_RANKED:
            token = _draw_among_few(
                candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset
            )
        elif done:
            token = _draw_among_many(
                candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset
            )
        elif count > top_k:
            limit, limit_id = _limit_of_top_k(
                groups_row, num_listed, logits, vocab_size, best, top_k, PASS_GROUPS
            )
    if not done:
        if (top_p < 1.0) & ((top_k > 0) | (min_p > 0.0)):
            num_listed = list_groups(groups_row, group_max_row, num_groups, limit, PADDED_GROUPS)
            whole_mass = mass_beyond(
                groups_row,
                num_listed,
                logits,
                vocab_size,
                best,
                1.0 / temperature,
                limit,
                limit_id,
                PASS_GROUPS,
            )
        token = _draw_until_accepted(
            groups_row, group_max_row, num_groups, logits, vocab_size,
            best, temperature, top_p, whole_mass, limit, limit_id, factor, offset,
            TILE_GROUPS, PASS_GROUPS, PADDED_GROUPS,
        )  # fmt: skip
    return token
