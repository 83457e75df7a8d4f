"""One program per sample: makes a token of what the scan left, and its log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    INF,
    MAX_CANDIDATES,
    MAX_RANKED,
    MIN_TEMPERATURE,
    NEG_INF,
    NUM_LOGPROBS,
    TEMPERATURE,
    edited_row,
    float_of_key,
    kinds_of_row,
    masked_row,
    noise_key,
    token_key,
)
from oneloop_kernels.ops.sampling.triton.greedy import write_token
from oneloop_kernels.ops.sampling.triton.passes import (
    count_beyond,
    first_of_largest,
    gather_candidates,
    largest_below,
    largest_maxima,
    list_groups,
    load_candidates,
    load_maxima,
    rank_candidates,
)
from oneloop_kernels.ops.sampling.triton.scan import merge_exponentials, uses_whole_mass
from oneloop_kernels.ops.sampling.triton.truncate import draw_random


@triton.jit(noinline=True)
def _write_likeliest(
    out_token, out_logprob, num_top, normalizer, best, groups_row, group_max_row, num_groups,
    candidate_logit, candidate_token, logits, vocab_size,
    TILE_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The num_top > 0 largest logits of a row in order, less the normalizer, and their ids."""
    reached = largest_maxima(group_max_row, num_groups, num_top, PADDED_GROUPS)
    num_listed = list_groups(groups_row, group_max_row, num_groups, reached, PADDED_GROUPS)
    count = gather_candidates(
        groups_row, num_listed, logits, vocab_size, reached, candidate_logit, candidate_token, TILE_GROUPS
    )
    if count <= MAX_RANKED:
        ranked = tl.arange(0, MAX_RANKED)
        x, token, key = load_candidates(candidate_logit, candidate_token, ranked, count)
        before, _ = rank_candidates(candidate_logit, candidate_token, key, count, best, 1.0)
        written = (ranked < count) & (before < num_top)
        tl.store(out_token + before, token, mask=written)
        tl.store(out_logprob + before, x - normalizer, mask=written)
    else:
        at = token_key(best, 0) + 1
        for place in range(num_top):
            at = largest_below(groups_row, num_listed, logits, vocab_size, at, TILE_GROUPS)
            tl.store(out_token + place, ((at & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32))
            tl.store(out_logprob + place, float_of_key((at >> 32).to(tl.int32)) - normalizer)


@triton.jit(noinline=True)
def write_logprobs(
    row, token, num_top, groups_row, group_max_row, group_sum_row, num_groups, candidate_logit, candidate_token,
    logits, vocab_size, rank_ptr, logprob_token_ptr, logprob_ptr,
    LOGPROB_COLUMNS: tl.constexpr, TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """Rank and log-softmax of the model's logits: at the token, then at the num_top largest in order."""
    maxima, lanes = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    sums = tl.load(group_sum_row + lanes, mask=lanes < num_groups, other=0.0)
    best = tl.max(maxima, 0)
    normalizer = best + tl.log(merge_exponentials(maxima, sums, best, 1.0))
    chosen = tl.load(logits[0] + token).to(tl.float32)
    out = row * LOGPROB_COLUMNS
    tl.store(logprob_token_ptr + out, token)
    tl.store(logprob_ptr + out, chosen - normalizer)
    num_listed = list_groups(groups_row, group_max_row, num_groups, chosen, PADDED_GROUPS)
    first_id = token * 0  # tokens that equal the chosen one do not count
    likelier = count_beyond(groups_row, num_listed, logits, vocab_size, chosen, first_id, PASS_GROUPS)
    tl.store(rank_ptr + row, likelier + 1)
    num_top = tl.minimum(tl.minimum(num_top, LOGPROB_COLUMNS - 1), vocab_size)
    if num_top > 0:
        _write_likeliest(
            logprob_token_ptr + out + 1, logprob_ptr + out + 1, num_top, normalizer, best,
            groups_row, group_max_row, num_groups, candidate_logit, candidate_token, logits, vocab_size,
            TILE_GROUPS, PADDED_GROUPS,
        )  # fmt: skip


@triton.jit
def _choose(
    is_random, row, slot, output_index_ptr, floats, ints, seeds_ptr, groups_row, group_max_row, group_sum_row,
    num_groups, candidate_logit, candidate_token, logits, vocab_size,
    TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
):  # fmt: skip
    """The row's token by its logits, the model's or edited: drawn, or the first of the largest."""
    maxima, lanes = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    best = tl.max(maxima, 0)
    if is_random:
        temperature = tl.load(floats + TEMPERATURE)
        whole_mass = 0.0
        if uses_whole_mass(floats, ints):
            sums = tl.load(group_sum_row + lanes, mask=lanes < num_groups, other=0.0)
            whole_mass = merge_exponentials(maxima, sums, best, 1.0 / temperature)
        factor, offset = noise_key(tl.load(seeds_ptr + slot), tl.load(output_index_ptr + row))
        token = draw_random(
            floats, ints, groups_row, group_max_row, num_groups, candidate_logit, candidate_token,
            logits, vocab_size, best, temperature, whole_mass, factor, offset,
            TILE_GROUPS, PASS_GROUPS, PADDED_GROUPS,
        )  # fmt: skip
    else:
        token = first_of_largest(maxima, lanes, best, logits, vocab_size)
    return token


@triton.jit(do_not_specialize=["num_groups", "penalties", "logprobs"])
def finish_kernel(
    logits_ptr, edited_ptr, marks_ptr, row_edited_ptr, history_ptr, header_ptr, sample_slot_ptr,
    mask_row_ptr, masks_ptr, output_index_ptr, floats_ptr, ints_ptr, seeds_ptr,
    group_max_ptr, group_sum_ptr, raw_group_max_ptr, raw_group_sum_ptr, groups_ptr, candidate_logit_ptr,
    candidate_token_ptr, token_out_ptr, last_token_ptr, rank_ptr, logprob_token_ptr, logprob_ptr,
    logits_stride, vocab_size, num_groups, penalties, logprobs,
    NUM_SAMPLES: tl.constexpr, EDITS: tl.constexpr, MASKS: tl.constexpr, LOGPROB_COLUMNS: tl.constexpr,
    TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: [bucket]. PADDED_GROUPS ≥ num_groups, a power of two. penalties, logprobs: whether the step has any."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    floats, ints = floats_ptr + slot * COLUMNS, ints_ptr + slot * COLUMNS
    group_max_row, group_sum_row = group_max_ptr + row * num_groups, group_sum_ptr + row * num_groups
    maxima, _ = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    is_bad = tl.max((~(maxima < INF)).to(tl.int32), 0) > 0
    is_random = (tl.load(floats + TEMPERATURE) >= MIN_TEMPERATURE) & (tl.max(maxima, 0) > NEG_INF)
    logits = (logits_ptr + row * logits_stride,)
    groups_row = groups_ptr + row * num_groups
    candidate_logit = candidate_logit_ptr + row * MAX_CANDIDATES
    candidate_token = candidate_token_ptr + row * MAX_CANDIDATES
    token = tl.full((), 0, tl.int32)
    if not is_bad:
        kinds = kinds_of_row(row_edited_ptr, mask_row_ptr, row, EDITS, MASKS)
        if kinds != 0:
            # Smaller tiles: no registers for whole ones.
            HALF: tl.constexpr = (PASS_GROUPS + 1) // 2
            with_edits = edited_row(logits[0], edited_ptr, marks_ptr, row, slot, vocab_size)
            if MASKS:
                with_edits = masked_row(with_edits, masks_ptr, mask_row_ptr, row, kinds, vocab_size)
            token = _choose(
                is_random, row, slot, output_index_ptr, floats, ints, seeds_ptr, groups_row, group_max_row,
                group_sum_row, num_groups, candidate_logit, candidate_token,
                with_edits, vocab_size,
                TILE_GROUPS, HALF, PADDED_GROUPS,
            )  # fmt: skip
        else:
            token = _choose(
                is_random, row, slot, output_index_ptr, floats, ints, seeds_ptr, groups_row, group_max_row,
                group_sum_row, num_groups, candidate_logit, candidate_token, logits, vocab_size,
                TILE_GROUPS, PASS_GROUPS, PADDED_GROUPS,
            )  # fmt: skip
    write_token(
        row,
        slot,
        token,
        is_bad,
        token_out_ptr,
        last_token_ptr,
        ints,
        history_ptr,
        marks_ptr,
        vocab_size,
        penalties,
    )
    num_top = tl.load(ints + NUM_LOGPROBS)
    if (logprobs != 0) & (num_top >= 0) & (not is_bad):
        write_logprobs(
            row, token, num_top, groups_row, raw_group_max_ptr + row * num_groups, raw_group_sum_ptr + row * num_groups,
            num_groups, candidate_logit, candidate_token, logits, vocab_size, rank_ptr, logprob_token_ptr, logprob_ptr,
            LOGPROB_COLUMNS, TILE_GROUPS, PASS_GROUPS, PADDED_GROUPS,
        )  # fmt: skip
