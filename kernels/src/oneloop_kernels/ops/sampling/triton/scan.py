"""The pass over all logits of a step with random rows or log-probabilities.

It leaves the maximum of every group of tokens, and where a row's top_p or log-probabilities need it the sum of the
group's exponentials. `finish.py` makes tokens of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    GROUP,
    LOG2_E,
    MIN_P,
    MIN_TEMPERATURE,
    NEG_INF,
    NUM_LOGPROBS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    edited_row,
    first_tiles,
    group_maximum,
    kinds_of_row,
    masked_row,
    next_tiles,
    tile_logits,
)


@triton.jit
def uses_whole_mass(floats, ints):
    """Whether the slot is random and its top_p is a share of all tokens' mass, not of what top_k or min_p leave."""
    alone = (tl.load(ints + TOP_K) <= 0) & (tl.load(floats + MIN_P) <= 0.0)
    return alone & (tl.load(floats + TOP_P) < 1.0) & (tl.load(floats + TEMPERATURE) >= MIN_TEMPERATURE)


@triton.jit
def _sum_of_exponentials(x, maxima, inverse):
    """Σ exp((x − maximum) · inverse) of each line of [groups, tokens]."""
    origin = tl.where(maxima == NEG_INF, 0.0, maxima)
    return tl.sum(tl.exp2((x - origin[:, None]) * (inverse * LOG2_E)), 1)


@triton.jit
def merge_exponentials(maxima, sums, best, inverse):
    """Σ exp((x − best) · inverse) over all groups."""
    relative = tl.exp2((maxima - best) * (inverse * LOG2_E))
    return tl.sum(tl.where(maxima == NEG_INF, 0.0, sums * relative), 0)


@triton.jit
def scan_row(
    logits, first_group, num_tiles, vocab_size, inverse, whole_mass, wants_raw,
    group_max_row, group_sum_row, raw_group_max_row, raw_group_sum_row,
    TILE_GROUPS: tl.constexpr,
):  # fmt: skip
    """logits: as `load_row` takes them. The next tile of the model's is loaded ahead."""
    num_groups = (vocab_size + GROUP - 1) // GROUP
    TILE: tl.constexpr = TILE_GROUPS * GROUP
    first = first_group * GROUP
    following, later = first_tiles(logits, first, vocab_size, num_tiles, TILE)
    for tile in range(num_tiles):
        groups = first_group + tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        raw = tl.reshape(following[0].to(tl.float32), (TILE_GROUPS, GROUP))
        x = tl.reshape(tile_logits(following, TILE), (TILE_GROUPS, GROUP))
        following, later = next_tiles(logits, following, later, first, tile, vocab_size, num_tiles, TILE)
        maxima = group_maximum(x)
        there = groups < num_groups
        tl.store(group_max_row + groups, maxima, mask=there)
        if whole_mass:
            tl.store(group_sum_row + groups, _sum_of_exponentials(x, maxima, inverse), mask=there)
        if wants_raw:
            raw_maxima = maxima
            if len(logits) > 1:
                raw_maxima = tl.max(raw, 1)
            tl.store(raw_group_max_row + groups, raw_maxima, mask=there)
            tl.store(raw_group_sum_row + groups, _sum_of_exponentials(raw, raw_maxima, 1.0), mask=there)


@triton.jit(do_not_specialize=["edits", "logprobs", "num_tiles"])
def scan_kernel(
    logits_ptr, edited_ptr, marks_ptr, row_edited_ptr, header_ptr, sample_slot_ptr, mask_row_ptr, masks_ptr,
    floats_ptr, ints_ptr, group_max_ptr, group_sum_ptr, raw_group_max_ptr, raw_group_sum_ptr,
    logits_stride, vocab_size, edits, logprobs, num_tiles,
    NUM_SAMPLES: tl.constexpr, MASKS: tl.constexpr, TILE_GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: [splits, bucket]; num_tiles tiles of TILE_GROUPS · GROUP tokens each.

    edits, logprobs, MASKS: whether the step has any.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    floats, ints = floats_ptr + slot * COLUMNS, ints_ptr + slot * COLUMNS
    inverse = 1.0 / tl.maximum(tl.load(floats + TEMPERATURE), MIN_TEMPERATURE)
    whole_mass = uses_whole_mass(floats, ints)
    wants_raw = (tl.load(ints + NUM_LOGPROBS) >= 0) & (logprobs != 0)
    logits = (logits_ptr + row * logits_stride,)
    first_group = tl.program_id(0) * num_tiles * TILE_GROUPS
    at = row * ((vocab_size + GROUP - 1) // GROUP)
    kinds = kinds_of_row(row_edited_ptr, mask_row_ptr, row, edits, MASKS)
    if kinds != 0:
        with_edits = edited_row(logits[0], edited_ptr, marks_ptr, row, slot, vocab_size)
        if MASKS:
            with_edits = masked_row(with_edits, masks_ptr, mask_row_ptr, row, kinds, vocab_size)
        # Smaller tiles: no registers for whole ones.
        HALF: tl.constexpr = (TILE_GROUPS + 1) // 2
        scan_row(
            with_edits, first_group, num_tiles * (TILE_GROUPS // HALF), vocab_size, inverse, whole_mass, wants_raw,
            group_max_ptr + at, group_sum_ptr + at, raw_group_max_ptr + at, raw_group_sum_ptr + at,
            HALF,
        )  # fmt: skip
    else:
        scan_row(
            logits, first_group, num_tiles, vocab_size, inverse, whole_mass, wants_raw,
            group_max_ptr + at, group_sum_ptr + at, raw_group_max_ptr + at, raw_group_sum_ptr + at,
            TILE_GROUPS,
        )  # fmt: skip
