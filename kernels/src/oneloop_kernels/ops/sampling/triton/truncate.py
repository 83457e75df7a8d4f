"""Drawing from part of a row: top_k, top_p and min_p without sorting it.

Tokens are ordered by `token_key` (logit, then lowest id), so every set of likeliest tokens is "all keys above one".
With top_k the candidates are gathered and the thresholds found among them by bisection. Without, the winner of the
unrestricted draw is tested: if the tokens before it have less than top_p of the mass, it belongs to the nucleus, and as
the winner among more tokens than the nucleus it is the nucleus' winner too. If not, the nucleus lies before it, and the
draw is repeated there. A draw is accepted with probability ≥ top_p, so few rows need a second one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    MAX_CANDIDATES,
    MIN_P,
    NEG_INF,
    NO_TOKEN,
    TOP_K,
    TOP_P,
    float_of_key,
    hash31,
    middle,
    noise_of,
    scaled,
    token_key,
)
from oneloop_kernels.ops.sampling.triton.passes import (
    LOWEST_KEY,
    NO_KEY,
    collect_groups,
    draw_above,
    gather_candidates,
    largest_maxima,
    sum_above,
)


@triton.jit
def _draw_among_candidates(
    candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset
):
    """The winner among the first `count` candidates, at least the top_k likeliest tokens of the row."""
    lanes = tl.arange(0, MAX_CANDIDATES)
    mask = lanes < count
    x = tl.load(candidate_logit + lanes, mask=mask, other=NEG_INF)
    token = tl.load(candidate_token + lanes, mask=mask, other=NO_TOKEN)
    key = tl.where(mask, token_key(x, token), NO_KEY)
    s = scaled(x, best, temperature)
    low = tl.min(tl.where(mask, key, 2**63 - 1), 0)
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
        beyond = kept * 0  # keys from `high` on
        while kept - beyond > 1:  # what is kept reaches the mass, without the last it does not
            pivot = middle(low, high)
            above = key >= pivot
            at_pivot = tl.sum(above.to(tl.int32), 0)
            if tl.sum(tl.where(above, mass, 0.0), 0) >= wanted:
                low = pivot
                kept = at_pivot
            else:
                high = pivot
                beyond = at_pivot
    perturbed = tl.where(key >= low, s + noise_of(hash31(token, factor, offset)), NEG_INF)
    return tl.min(tl.where((perturbed == tl.max(perturbed, 0)) & (key >= low), token, NO_TOKEN), 0)


@triton.jit
def _threshold_of_top_k(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, temperature, least, top_k,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """A key that exactly top_k tokens exceed (of those with a scaled logit ≥ least, which are more), pass by pass."""
    high = token_key(best, 0)
    low = high * 0 + LOWEST_KEY
    count = top_k + 1
    while count != top_k:
        pivot = middle(low, high)
        count, _ = sum_above(
            groups_row, num_listed, logits, edited, is_edited, vocab_size,
            best, temperature, least, pivot, EDITS, TILE_GROUPS,
        )  # fmt: skip
        if count >= top_k:
            low = pivot
        else:
            high = pivot
    return low


@triton.jit
def _draw_until_accepted(
    groups_row, group_max_row, num_groups, logits, edited, is_edited, vocab_size,
    best, temperature, least, lowest_logit, top_p, whole_mass, floor, token, logit, factor, offset,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Test the draw (token, logit); repeat it among likelier tokens until it lies within what is kept.

    floor: only keys above it may be drawn. whole_mass: Σ exp(scaled logit) of all tokens that may be drawn.
    """
    above = floor
    above_logit = float_of_key((floor >> 32).to(tl.int32))
    if floor == NO_KEY:
        above_logit = float("-inf")
    accepted = False
    while not accepted:
        key = token_key(logit, token)
        accepted = (key > above) & (scaled(logit, best, temperature) >= least)
        if accepted & (top_p < 1.0):
            num_listed = collect_groups(groups_row, group_max_row, logit, num_groups, PADDED_GROUPS)
            _, likelier = sum_above(
                groups_row, num_listed, logits, edited, is_edited, vocab_size,
                best, temperature, least, key, EDITS, TILE_GROUPS,
            )  # fmt: skip
            accepted = likelier < top_p * whole_mass
            if not accepted:
                above = key
                above_logit = logit
        if not accepted:
            reached = tl.maximum(above_logit, lowest_logit)
            num_listed = collect_groups(groups_row, group_max_row, reached, num_groups, PADDED_GROUPS)
            token, logit = draw_above(
                groups_row, num_listed, logits, edited, is_edited, vocab_size,
                best, temperature, least, above, factor, offset, EDITS, TILE_GROUPS,
            )  # fmt: skip
            accepted = (
                token == NO_TOKEN
            )  # nothing is left: only where sums of the same mass were rounded differently
            token = tl.where(accepted, 0, token)
    return token


@triton.jit
def draw_truncated(
    floats, ints, groups_row, group_max_row, num_groups, candidate_logit, candidate_token,
    logits, edited, is_edited, vocab_size,
    best, temperature, whole_mass, token, logit, factor, offset,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The row's token. (token, logit): the winner of the unrestricted draw; whole_mass: with top_p alone."""
    top_k = tl.minimum(tl.load(ints + TOP_K), vocab_size)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    least = float("-inf")
    lowest_logit = float("-inf")
    if min_p > 0.0:
        least = tl.log(min_p)
        lowest_logit = best + temperature * least
        lowest_logit -= 1e-4 * tl.abs(lowest_logit)  # which groups to read; `least` decides on tokens
    floor = token_key(logit, token) * 0 + NO_KEY
    done = False
    if top_k > 0:
        at_least = largest_maxima(group_max_row, top_k, num_groups, PADDED_GROUPS)
        at_least = tl.maximum(at_least, lowest_logit)
        num_listed = collect_groups(groups_row, group_max_row, at_least, num_groups, PADDED_GROUPS)
        count = gather_candidates(
            groups_row, num_listed, logits, edited, is_edited, vocab_size,
            best, temperature, least, at_least, candidate_logit, candidate_token, EDITS, TILE_GROUPS,
        )  # fmt: skip
        done = count <= MAX_CANDIDATES
        if done:
            token = _draw_among_candidates(
                candidate_logit, candidate_token, count, top_k, top_p, best, temperature, factor, offset
            )
        elif count >= top_k:
            floor = _threshold_of_top_k(
                groups_row, num_listed, logits, edited, is_edited, vocab_size,
                best, temperature, least, top_k, EDITS, TILE_GROUPS,
            )  # fmt: skip
    if not done:
        if (top_p < 1.0) & ((top_k > 0) | (min_p > 0.0)):
            lowest = lowest_logit
            if floor != NO_KEY:
                lowest = float_of_key((floor >> 32).to(tl.int32))
            num_listed = collect_groups(groups_row, group_max_row, lowest, num_groups, PADDED_GROUPS)
            _, whole_mass = sum_above(
                groups_row, num_listed, logits, edited, is_edited, vocab_size,
                best, temperature, least, floor, EDITS, TILE_GROUPS,
            )  # fmt: skip
        token = _draw_until_accepted(
            groups_row, group_max_row, num_groups, logits, edited, is_edited, vocab_size,
            best, temperature, least, lowest_logit, top_p, whole_mass, floor, token, logit, factor, offset,
            EDITS, TILE_GROUPS, PADDED_GROUPS,
        )  # fmt: skip
    return token
