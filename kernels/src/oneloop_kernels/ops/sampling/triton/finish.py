"""One program per sample: makes a token of what the scan left, and its log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    MAX_CANDIDATES,
    MAX_SPLITS,
    MIN_TEMPERATURE,
    NEG_INF,
    NO_TOKEN,
    NUM_LOGPROBS,
    PARTIAL_COLUMNS,
    TEMPERATURE,
    float_of_key,
    noise_key,
    scaled,
    token_key,
)
from oneloop_kernels.ops.sampling.triton.greedy import write_token
from oneloop_kernels.ops.sampling.triton.passes import (
    collect_groups,
    largest_below,
    largest_maxima,
    sum_above,
)
from oneloop_kernels.ops.sampling.triton.scan import (
    PART_LOGIT,
    PART_MAXIMUM,
    PART_NOISE,
    PART_RAW_MAXIMUM,
    PART_RAW_SUM,
    PART_SUM,
    is_truncated,
    uses_whole_mass,
)
from oneloop_kernels.ops.sampling.triton.truncate import draw_truncated


@triton.jit
def _merge_draws(partials, part_token, lanes, mask, best, temperature):
    """The winner over all parts: (token, its logit). Greedy rows: temperature 0."""
    logits = tl.load(partials + PART_LOGIT * MAX_SPLITS + lanes, mask=mask, other=NEG_INF)
    tokens = tl.load(part_token + lanes, mask=mask, other=NO_TOKEN)
    perturbed = logits
    if temperature >= MIN_TEMPERATURE:
        noise = tl.load(partials + PART_NOISE * MAX_SPLITS + lanes, mask=mask, other=0.0)
        perturbed = scaled(logits, best, temperature) + noise
    token = tl.min(tl.where(mask & (perturbed == tl.max(perturbed, 0)), tokens, NO_TOKEN), 0)
    return token, tl.max(tl.where(tokens == token, logits, NEG_INF), 0)


@triton.jit
def _sum_of_parts(maxima, sums, overall, inverse):
    """Σ exp((x − overall) · inverse) over all parts."""
    return tl.sum(tl.where(maxima == NEG_INF, 0.0, sums * tl.exp((maxima - overall) * inverse)), 0)


@triton.jit
def _write_logprobs(
    row, token, num_top, partials, lanes, mask,
    groups_row, raw_group_max_row, num_groups, logits, vocab_size,
    rank_ptr, logprob_token_ptr, logprob_ptr,
    LOGPROB_COLUMNS: tl.constexpr, TILE_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Rank and log-softmax of the model's logits: at the token, then at the num_top largest in order."""
    maxima = tl.load(partials + PART_RAW_MAXIMUM * MAX_SPLITS + lanes, mask=mask, other=NEG_INF)
    sums = tl.load(partials + PART_RAW_SUM * MAX_SPLITS + lanes, mask=mask, other=0.0)
    best = tl.max(maxima, 0)
    normalizer = best + tl.log(_sum_of_parts(maxima, sums, best, 1.0))
    chosen = tl.load(logits + token).to(tl.float32)
    out = row * LOGPROB_COLUMNS
    tl.store(logprob_token_ptr + out, token)
    tl.store(logprob_ptr + out, chosen - normalizer)
    num_listed = collect_groups(groups_row, raw_group_max_row, chosen, num_groups, PADDED_GROUPS)
    # No key of a token with the same logit is larger than this one.
    same_logit = token_key(chosen, 0)
    likelier, _ = sum_above(
        groups_row, num_listed, logits, logits, False, vocab_size,
        best, 1.0, NEG_INF, same_logit, False, TILE_GROUPS,
    )  # fmt: skip
    tl.store(rank_ptr + row, likelier + 1)
    num_top = tl.minimum(tl.minimum(num_top, LOGPROB_COLUMNS - 1), vocab_size)
    if num_top > 0:
        reached = largest_maxima(raw_group_max_row, num_top, num_groups, PADDED_GROUPS)
        num_listed = collect_groups(groups_row, raw_group_max_row, reached, num_groups, PADDED_GROUPS)
        key = token_key(best, 0) + 1
        for place in range(1, num_top + 1):
            key = largest_below(
                groups_row, num_listed, logits, logits, False, vocab_size, key, False, TILE_GROUPS
            )
            tl.store(logprob_token_ptr + out + place, ((key & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32))
            tl.store(logprob_ptr + out + place, float_of_key((key >> 32).to(tl.int32)) - normalizer)


@triton.jit(do_not_specialize=["splits", "num_groups"])
def finish_kernel(
    logits_ptr,
    edited_ptr,
    row_edited_ptr,
    history_ptr,
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
    groups_ptr,
    candidate_logit_ptr,
    candidate_token_ptr,
    token_out_ptr,
    last_token_ptr,
    rank_ptr,
    logprob_token_ptr,
    logprob_ptr,
    logits_stride,
    vocab_size,
    num_groups,
    splits,
    NUM_SAMPLES: tl.constexpr,
    RANDOM: tl.constexpr,
    EDITS: tl.constexpr,
    PENALTIES: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LOGPROB_COLUMNS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Grid: [bucket]. splits: of the scan. PADDED_GROUPS ≥ num_groups, a power of two."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    floats, ints = floats_ptr + slot * COLUMNS, ints_ptr + slot * COLUMNS
    temperature = tl.load(floats + TEMPERATURE)
    lanes = tl.arange(0, MAX_SPLITS)
    mask = lanes < splits
    partials = partial_ptr + row * (PARTIAL_COLUMNS * MAX_SPLITS)
    maxima = tl.load(partials + PART_MAXIMUM * MAX_SPLITS + lanes, mask=mask, other=NEG_INF)
    is_nan = tl.max((maxima != maxima).to(tl.int32), 0) > 0
    best = tl.max(tl.where(maxima != maxima, NEG_INF, maxima), 0)
    token, logit = _merge_draws(
        partials, partial_token_ptr + row * MAX_SPLITS, lanes, mask, best, temperature
    )
    logits, edited = logits_ptr + row * logits_stride, edited_ptr + row * vocab_size
    groups_row = groups_ptr + row * num_groups
    if RANDOM:
        if is_truncated(floats, ints) and (not is_nan) and (best > NEG_INF):
            is_edited = False
            if EDITS:
                is_edited = tl.load(row_edited_ptr + row) != 0
            factor, offset = noise_key(tl.load(seeds_ptr + slot), tl.load(output_index_ptr + row))
            whole_mass = 0.0
            if uses_whole_mass(floats, ints):
                sums = tl.load(partials + PART_SUM * MAX_SPLITS + lanes, mask=mask, other=0.0)
                whole_mass = _sum_of_parts(maxima, sums, best, 1.0 / temperature)
            token = draw_truncated(
                floats, ints, groups_row, group_max_ptr + row * num_groups, num_groups,
                candidate_logit_ptr + row * MAX_CANDIDATES, candidate_token_ptr + row * MAX_CANDIDATES,
                logits, edited, is_edited, vocab_size,
                best, temperature, whole_mass, token, logit, factor, offset,
                EDITS, TILE_GROUPS, PADDED_GROUPS,
            )  # fmt: skip
    token = tl.where(is_nan, 0, token)
    write_token(
        row, slot, token, is_nan, token_out_ptr, last_token_ptr, ints_ptr, history_ptr, vocab_size, PENALTIES
    )
    if LOGPROBS:
        num_top = tl.load(ints + NUM_LOGPROBS)
        if num_top >= 0 and not is_nan:
            _write_logprobs(
                row, token, num_top, partials, lanes, mask,
                groups_row, raw_group_max_ptr + row * num_groups, num_groups, logits, vocab_size,
                rank_ptr, logprob_token_ptr, logprob_ptr,
                LOGPROB_COLUMNS, TILE_GROUPS, PADDED_GROUPS,
            )  # fmt: skip
