"""Looking again at part of a row: only at groups of tokens whose maximum says that they can matter."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    GROUP,
    MAX_CANDIDATES,
    NEG_INF,
    NO_TOKEN,
    float_of_key,
    hash31,
    load_row,
    middle,
    noise_of,
    order_key,
    scaled,
    token_key,
)

NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every token."""
LOWEST_KEY = tl.constexpr(-0x7F800001 << 32)
"""At most the key of any token with −∞; its upper half still is the key of a float."""

STAGES = tl.constexpr(3)
"""Tiles on their way: a list of all groups is read by a single program, tile after tile."""


@triton.jit
def collect_groups(groups_row, group_max_row, at_least, num_groups, PADDED_GROUPS: tl.constexpr):
    """Write the numbers of the groups whose maximum reaches a logit, ascending; how many there are."""
    tl.debug_barrier()  # readers of the list before
    lanes = tl.arange(0, PADDED_GROUPS)
    maxima = tl.load(group_max_row + lanes, mask=lanes < num_groups, other=NEG_INF)
    chosen = (maxima >= at_least) & (lanes < num_groups)
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups_row + places, lanes, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def largest_maxima(group_max_row, count, num_groups, PADDED_GROUPS: tl.constexpr):
    """A logit that at least `count` groups reach, as large as can be; −∞ where there are not so many groups.

    So at least `count` tokens reach it, and hardly more where groups are many.
    """
    lanes = tl.arange(0, PADDED_GROUPS)
    maxima = tl.load(group_max_row + lanes, mask=lanes < num_groups, other=NEG_INF)
    keys = tl.where(lanes < num_groups, order_key(maxima), -(2**31))
    low = tl.min(tl.where(lanes < num_groups, keys, 2**31 - 1), 0)
    high = tl.max(keys, 0) + 1
    reached = num_groups
    while (reached > count) & (middle(low, high) > low):
        pivot = middle(low, high)
        at_pivot = tl.sum((keys >= pivot).to(tl.int32), 0)
        if at_pivot >= count:
            low = pivot
            reached = at_pivot
        else:
            high = pivot
    return tl.where(num_groups >= count, float_of_key(low), NEG_INF)


@triton.jit
def _load_groups(
    groups_row, start, num_groups, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS: tl.constexpr
):
    """(logits, token ids, mask) of TILE_GROUPS groups of the list."""
    at = start + tl.arange(0, TILE_GROUPS)
    groups = tl.load(groups_row + at, mask=at < num_groups, other=0)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (columns < vocab_size) & (at < num_groups)[:, None]
    return load_row(logits, edited, is_edited, columns, mask, EDITS), columns, mask


@triton.jit
def sum_above(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, temperature, least, above,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """How many tokens have a key > above and a scaled logit ≥ least, and Σ exp(scaled logit) over them."""
    count = tl.zeros((TILE_GROUPS, GROUP), tl.int32)
    mass = tl.zeros((TILE_GROUPS, GROUP), tl.float32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=STAGES):
        x, columns, mask = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        s = scaled(x, best, temperature)
        counted = mask & (token_key(x, columns) > above) & (s >= least)
        count += counted.to(tl.int32)
        mass += tl.where(counted, tl.exp(s), 0.0)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(mass, 1), 0)


@triton.jit
def draw_above(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, temperature, least, above, factor, offset,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The winner of the draw among tokens with a key > above and a scaled logit ≥ least: (token, its logit)."""
    winner = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    token = tl.full((TILE_GROUPS, GROUP), NO_TOKEN, tl.int32)
    logit = tl.full((TILE_GROUPS, GROUP), NEG_INF, tl.float32)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=STAGES):
        x, columns, mask = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        s = scaled(x, best, temperature)
        counted = mask & (token_key(x, columns) > above) & (s >= least)
        perturbed = tl.where(counted, s + noise_of(hash31(columns, factor, offset)), NEG_INF)
        better = perturbed > winner
        winner = tl.where(better, perturbed, winner)
        token = tl.where(better, columns, token)
        logit = tl.where(better, x, logit)
    overall = tl.max(tl.max(winner, 1), 0)
    chosen = tl.min(tl.min(tl.where(winner == overall, token, NO_TOKEN), 1), 0)
    its_logit = tl.max(tl.max(tl.where(token == chosen, logit, NEG_INF), 1), 0)
    return chosen, its_logit


@triton.jit
def largest_below(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    below,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """The largest key of a listed token that is smaller than `below`."""
    largest = tl.full((TILE_GROUPS, GROUP), NO_KEY, tl.int64)
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=STAGES):
        x, columns, mask = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        key = token_key(x, columns)
        largest = tl.maximum(largest, tl.where(mask & (key < below), key, NO_KEY))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def gather_candidates(
    groups_row, num_listed, logits, edited, is_edited, vocab_size,
    best, temperature, least, at_least,
    candidate_logit, candidate_token,
    EDITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Write logits and ids of the tokens that reach the logit `at_least` and the scaled logit `least`.

    How many there are; only the first MAX_CANDIDATES are written.
    """
    count = num_listed * 0
    for start in tl.range(0, num_listed, TILE_GROUPS, num_stages=STAGES):
        x, columns, mask = _load_groups(
            groups_row, start, num_listed, logits, edited, is_edited, vocab_size, EDITS, TILE_GROUPS
        )
        chosen = mask & (x >= at_least) & (scaled(x, best, temperature) >= least)
        flat = tl.ravel(chosen.to(tl.int32))
        places = count + tl.cumsum(flat, 0) - 1
        written = (flat > 0) & (places < MAX_CANDIDATES)
        tl.store(candidate_logit + places, tl.ravel(x), mask=written)
        tl.store(candidate_token + places, tl.ravel(columns), mask=written)
        count += tl.sum(flat, 0)
    tl.debug_barrier()
    return count
