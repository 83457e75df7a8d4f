"""The pass over all logits of a step with random rows or log-probabilities.

Each program takes a part of a row's vocabulary and leaves: the winner of the unrestricted draw, the maximum, the sum of
exponentials, and the maximum of every group of tokens. `finish.py` makes tokens of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    GROUP,
    HASH_RANGE,
    MAX_SPLITS,
    MIN_P,
    MIN_TEMPERATURE,
    NEG_INF,
    NO_TOKEN,
    NUM_LOGPROBS,
    PARTIAL_COLUMNS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    group_extremes,
    group_maximum,
    hash31,
    load_row,
    noise_key,
    noise_of,
    scaled,
)

PART_LOGIT = tl.constexpr(0)
PART_NOISE = tl.constexpr(1)
PART_MAXIMUM = tl.constexpr(2)
PART_SUM = tl.constexpr(3)
PART_RAW_MAXIMUM = tl.constexpr(4)
PART_RAW_SUM = tl.constexpr(5)


@triton.jit
def is_truncated(floats, ints):
    """Whether the slot is random and top_k, top_p or min_p drops tokens of it."""
    random = tl.load(floats + TEMPERATURE) >= MIN_TEMPERATURE
    narrowed = (tl.load(ints + TOP_K) > 0) | (tl.load(floats + TOP_P) < 1.0) | (tl.load(floats + MIN_P) > 0.0)
    return random & narrowed


@triton.jit
def uses_whole_mass(floats, ints):
    """Whether the slot's top_p is a share of all tokens' mass, not of what top_k or min_p leave."""
    alone = (tl.load(ints + TOP_K) <= 0) & (tl.load(floats + MIN_P) <= 0.0)
    return alone & (tl.load(floats + TOP_P) < 1.0)


@triton.jit
def _add_exponentials(x, old_maximum, new_maximum, total, inverse):
    """Σ exp((x − maximum) · inverse) of each line, one more [groups, tokens] taken in."""
    origin = tl.where(new_maximum == NEG_INF, 0.0, new_maximum)
    terms = tl.sum(tl.exp((x - origin[:, None]) * inverse), 1)
    return total * tl.exp((old_maximum - origin) * inverse) + terms


@triton.jit
def _merge_exponentials(maximum, total, inverse):
    """Over all lines, relative to the largest maximum."""
    overall = tl.max(maximum, 0)
    origin = tl.where(overall == NEG_INF, 0.0, overall)
    return tl.sum(total * tl.exp((maximum - origin) * inverse), 0)


@triton.jit
def _draw_further(
    x, columns, hashed, maxima, least_hash, best_logit, best_noise, best_token,
    temperature, inverse, factor, offset,
):  # fmt: skip
    """The winner so far, one more tile taken in.

    A token of hash h and uniform v ≈ h / 2³¹ has noise < −log v, so only one with h < 2³¹ · exp(its lead in logits −
    the winner's noise) can win. With the largest logit of its group in place of its own, that is one comparison; the
    noise itself is computed for few tiles.
    """
    chance = tl.exp((maxima - best_logit) * inverse - best_noise)
    within_reach = least_hash.to(tl.float32) < chance * (1.001 * HASH_RANGE) + 2.0
    if tl.max(within_reach.to(tl.int32), 0) > 0:
        best = tl.maximum(best_logit, tl.max(maxima, 0))
        perturbed = scaled(x, best, temperature) + noise_of(hashed)
        winner = tl.max(tl.max(perturbed, 1), 0)
        if winner > scaled(best_logit, best, temperature) + best_noise:
            best_token = tl.min(tl.min(tl.where(perturbed == winner, columns, NO_TOKEN), 1), 0)
            best_noise = noise_of(hash31(best_token, factor, offset))
            best_logit = tl.sum(tl.sum(tl.where(columns == best_token, x, 0.0), 1), 0)
    return best_logit, best_noise, best_token


@triton.jit(do_not_specialize=["num_tiles"])
def scan_kernel(
    logits_ptr,
    edited_ptr,
    row_edited_ptr,
    header_ptr,
    sample_slot_ptr,
    output_index_ptr,
    floats_ptr,
    ints_ptr,
    seeds_ptr,
    partial_ptr,
    partial_token_ptr,
    group_max_ptr,
    raw_group_max_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    NUM_SAMPLES: tl.constexpr,
    EDITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid: [splits, bucket]; num_tiles tiles of TILE_GROUPS · GROUP tokens each."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    floats, ints = floats_ptr + slot * COLUMNS, ints_ptr + slot * COLUMNS
    temperature = tl.load(floats + TEMPERATURE)
    is_random = temperature >= MIN_TEMPERATURE
    inverse = 1.0 / tl.maximum(temperature, MIN_TEMPERATURE)
    truncated = is_truncated(floats, ints)
    whole_mass = is_random & uses_whole_mass(floats, ints)
    wants_raw = False
    if LOGPROBS:
        wants_raw = tl.load(ints + NUM_LOGPROBS) >= 0
    is_edited = False
    if EDITS:
        is_edited = tl.load(row_edited_ptr + row) != 0
    factor, offset = noise_key(tl.load(seeds_ptr + slot), tl.load(output_index_ptr + row))
    num_groups = (vocab_size + GROUP - 1) // GROUP
    logits, edited = logits_ptr + row * logits_stride, edited_ptr + row * vocab_size
    first_group = tl.program_id(0) * num_tiles * TILE_GROUPS
    lines = tl.arange(0, TILE_GROUPS)
    tokens = tl.arange(0, GROUP)
    best_logit, best_noise, best_token = float("-inf"), 0.0, first_group * GROUP
    has_nan = tl.zeros((TILE_GROUPS,), tl.int32)
    line_maximum = tl.full((TILE_GROUPS,), NEG_INF, tl.float32)
    line_tile = tl.zeros((TILE_GROUPS,), tl.int32)
    line_sum = tl.zeros((TILE_GROUPS,), tl.float32)
    raw_maximum = tl.full((TILE_GROUPS,), NEG_INF, tl.float32)
    raw_sum = tl.zeros((TILE_GROUPS,), tl.float32)
    offsets = first_group * GROUP + lines[:, None] * GROUP + tokens[None, :]
    if not EDITS:
        following = tl.load(logits + offsets, mask=offsets < vocab_size, other=NEG_INF)
    for tile in range(num_tiles):
        groups = first_group + tile * TILE_GROUPS + lines
        columns = offsets + tile * (TILE_GROUPS * GROUP)
        if EDITS:
            x = load_row(logits, edited, is_edited, columns, columns < vocab_size, EDITS)
        else:
            x = following.to(tl.float32)
            ahead = columns + TILE_GROUPS * GROUP
            ahead_mask = (ahead < vocab_size) & (tile + 1 < num_tiles)
            following = tl.load(logits + ahead, mask=ahead_mask, other=NEG_INF)
        hashed = hash31(columns, factor, offset)  # not computed where it is not used
        if is_random:
            maxima, least_hash = group_extremes(x, hashed)
        else:
            maxima = group_maximum(x)
            least_hash = tl.zeros((TILE_GROUPS,), tl.int32)
        has_nan |= (maxima != maxima).to(tl.int32)
        maxima = tl.where(maxima != maxima, NEG_INF, maxima)
        if LOGPROBS:
            if wants_raw:
                raw, raw_maxima = x, maxima
                if EDITS:
                    raw = tl.load(logits + columns, mask=columns < vocab_size, other=NEG_INF).to(tl.float32)
                    raw_maxima = tl.max(raw, 1)
                tl.store(raw_group_max_ptr + row * num_groups + groups, raw_maxima, mask=groups < num_groups)
                new_maximum = tl.maximum(raw_maximum, raw_maxima)
                raw_sum = _add_exponentials(raw, raw_maximum, new_maximum, raw_sum, 1.0)
                raw_maximum = new_maximum
        if is_random:
            if truncated:
                tl.store(group_max_ptr + row * num_groups + groups, maxima, mask=groups < num_groups)
            if whole_mass:
                new_maximum = tl.maximum(line_maximum, maxima)
                line_sum = _add_exponentials(x, line_maximum, new_maximum, line_sum, inverse)
            best_logit, best_noise, best_token = _draw_further(
                x, columns, hashed, maxima, least_hash, best_logit, best_noise, best_token,
                temperature, inverse, factor, offset,
            )  # fmt: skip
        line_tile = tl.where(maxima > line_maximum, tile, line_tile)
        line_maximum = tl.maximum(line_maximum, maxima)
    maximum = tl.max(line_maximum, 0)
    if not is_random:
        best_logit = maximum
        group = tl.min(tl.where(line_maximum == maximum, line_tile * TILE_GROUPS + lines, NO_TOKEN), 0)
        columns = (first_group + group) * GROUP + tokens
        x = load_row(logits, edited, is_edited, columns, columns < vocab_size, EDITS)
        best_token = tl.min(tl.where(x == maximum, columns, NO_TOKEN), 0)
    split = tl.program_id(0)
    partials = partial_ptr + row * (PARTIAL_COLUMNS * MAX_SPLITS) + split
    tl.store(partials + PART_LOGIT * MAX_SPLITS, best_logit)
    tl.store(partials + PART_NOISE * MAX_SPLITS, best_noise)
    tl.store(partials + PART_MAXIMUM * MAX_SPLITS, tl.where(tl.max(has_nan, 0) > 0, float("nan"), maximum))
    tl.store(partial_token_ptr + row * MAX_SPLITS + split, best_token)
    if whole_mass:
        tl.store(partials + PART_SUM * MAX_SPLITS, _merge_exponentials(line_maximum, line_sum, inverse))
    if LOGPROBS:
        if wants_raw:
            tl.store(partials + PART_RAW_MAXIMUM * MAX_SPLITS, tl.max(raw_maximum, 0))
            tl.store(partials + PART_RAW_SUM * MAX_SPLITS, _merge_exponentials(raw_maximum, raw_sum, 1.0))
