"""What changes when slots are admitted or forked: parameters, lists, and the history that penalties look at."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    NUM_BANNED,
    NUM_BIAS,
    NUM_LOGPROBS,
    PENALIZED,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    mark,
    words_of_row,
)


@triton.jit
def admit_kernel(
    slot_ptr, temperature_ptr, top_p_ptr, min_p_ptr, repetition_ptr, presence_ptr, frequency_ptr, top_k_ptr,
    num_logprobs_ptr, min_tokens_ptr, seed_ptr, bias_start_ptr, bias_token_ptr, bias_value_ptr,
    banned_start_ptr, banned_token_ptr, floats_ptr, ints_ptr, seeds_ptr, slot_bias_token_ptr,
    slot_bias_value_ptr, slot_banned_token_ptr,
    MAX_BIAS: tl.constexpr, MAX_BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tables' row of one admitted slot. Grid: [num_admitted]."""
    entry = tl.program_id(0)
    slot = tl.load(slot_ptr + entry).to(tl.int64)
    floats = floats_ptr + slot * COLUMNS
    repetition = tl.load(repetition_ptr + entry)
    presence = tl.load(presence_ptr + entry)
    frequency = tl.load(frequency_ptr + entry)
    tl.store(floats + TEMPERATURE, tl.load(temperature_ptr + entry))
    tl.store(floats + TOP_P, tl.load(top_p_ptr + entry))
    tl.store(floats + MIN_P, tl.load(min_p_ptr + entry))
    tl.store(floats + REPETITION, repetition)
    tl.store(floats + PRESENCE, presence)
    tl.store(floats + FREQUENCY, frequency)
    bias_start = tl.load(bias_start_ptr + entry)
    num_bias = tl.minimum(tl.load(bias_start_ptr + entry + 1) - bias_start, MAX_BIAS)
    banned_start = tl.load(banned_start_ptr + entry)
    num_banned = tl.minimum(tl.load(banned_start_ptr + entry + 1) - banned_start, MAX_BANNED)
    penalized = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    ints = ints_ptr + slot * COLUMNS
    tl.store(ints + TOP_K, tl.load(top_k_ptr + entry))
    tl.store(ints + NUM_LOGPROBS, tl.load(num_logprobs_ptr + entry))
    tl.store(ints + MIN_TOKENS, tl.load(min_tokens_ptr + entry))
    tl.store(ints + NUM_BIAS, num_bias)
    tl.store(ints + NUM_BANNED, num_banned)
    tl.store(ints + PENALIZED, penalized.to(tl.int32))
    tl.store(seeds_ptr + slot, tl.load(seed_ptr + entry))
    lanes = tl.arange(0, BLOCK)
    for start in range(0, num_bias, BLOCK):
        at = start + lanes
        mask = at < num_bias
        token = tl.load(bias_token_ptr + bias_start + at, mask=mask)
        value = tl.load(bias_value_ptr + bias_start + at, mask=mask)
        tl.store(slot_bias_token_ptr + slot * MAX_BIAS + at, token, mask=mask)
        tl.store(slot_bias_value_ptr + slot * MAX_BIAS + at, value, mask=mask)
    for start in range(0, num_banned, BLOCK):
        at = start + lanes
        mask = at < num_banned
        token = tl.load(banned_token_ptr + banned_start + at, mask=mask)
        tl.store(slot_banned_token_ptr + slot * MAX_BANNED + at, token, mask=mask)


@triton.jit
def _wants_marks(ints):
    """Whether any token of the slot may ever be edited."""
    return (tl.load(ints + PENALIZED) != 0) | (tl.load(ints + NUM_BIAS) + tl.load(ints + NUM_BANNED) > 0)


@triton.jit(do_not_specialize=["has_history"])
def clear_edits_kernel(
    slot_ptr, ints_ptr, history_ptr, marks_ptr, vocab_size, has_history, BLOCK: tl.constexpr
):
    """Zero marks and history of admitted slots that need them. Grid: [num_admitted, ceil(vocab_size / BLOCK)].

    BLOCK: a multiple of GROUP.
    """
    slot = tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    ints = ints_ptr + slot * COLUMNS
    if not _wants_marks(ints):
        return
    words = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    num_words = words_of_row(vocab_size)
    nothing = tl.zeros((BLOCK // 32,), tl.int32)
    tl.store(marks_ptr + slot * num_words + words, nothing, mask=words < num_words)
    if (has_history != 0) & (tl.load(ints + PENALIZED) != 0):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        none_seen = tl.zeros((BLOCK,), tl.int32)
        tl.store(history_ptr + slot * vocab_size + columns, none_seen, mask=columns < vocab_size)


@triton.jit
def _mark_list(marks, tokens, count, vocab_size, BLOCK: tl.constexpr):
    """Mark the tokens of a list, which the programs of dimension 1 share."""
    for first in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, mask=at < count, other=-1)
        mark(marks, token, (token >= 0) & (token < vocab_size))


@triton.jit(do_not_specialize=["has_history"])
def fill_edits_kernel(
    slot_ptr, start_ptr, num_prompt_ptr, token_ptr, ints_ptr, slot_bias_token_ptr, slot_banned_token_ptr,
    history_ptr, marks_ptr, vocab_size, has_history,
    MAX_BIAS: tl.constexpr, MAX_BANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark tokens of the lists, and of the history, in which the prompt's are noted and the output's counted.

    Grid: [num_admitted, programs that share a slot's lists].
    """
    entry = tl.program_id(0)
    slot = tl.load(slot_ptr + entry).to(tl.int64)
    ints = ints_ptr + slot * COLUMNS
    if not _wants_marks(ints):
        return
    marks = marks_ptr + slot * words_of_row(vocab_size)
    num_bias, num_banned = tl.load(ints + NUM_BIAS), tl.load(ints + NUM_BANNED)
    _mark_list(marks, slot_bias_token_ptr + slot * MAX_BIAS, num_bias, vocab_size, BLOCK)
    _mark_list(marks, slot_banned_token_ptr + slot * MAX_BANNED, num_banned, vocab_size, BLOCK)
    if (has_history == 0) | (tl.load(ints + PENALIZED) == 0):
        return
    start = tl.load(start_ptr + entry)
    num_known = tl.load(start_ptr + entry + 1) - start
    num_prompt = tl.load(num_prompt_ptr + entry)
    _mark_list(marks, token_ptr + start, num_known, vocab_size, BLOCK)
    history = history_ptr + slot * vocab_size
    for first in range(tl.program_id(1) * BLOCK, num_known, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(token_ptr + start + at, mask=at < num_known, other=-1)
        known = (token >= 0) & (token < vocab_size)
        tl.atomic_or(history + token, -2147483648, mask=known & (at < num_prompt), sem="relaxed")
        tl.atomic_add(history + token, 1, mask=known & (at >= num_prompt), sem="relaxed")


@triton.jit
def fork_history_kernel(src_ptr, dst_ptr, ints_ptr, history_ptr, marks_ptr, vocab_size, BLOCK: tl.constexpr):
    """history[dst] = history[src], whose tokens are marked for dst too. Grid: [num_forks, ceil(vocab_size / BLOCK)].

    BLOCK: a multiple of GROUP.
    """
    source = tl.load(src_ptr + tl.program_id(0)).to(tl.int64)
    target = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64)
    if tl.load(ints_ptr + target * COLUMNS + PENALIZED) == 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    counts = tl.load(history_ptr + source * vocab_size + columns, mask=mask)
    tl.store(history_ptr + target * vocab_size + columns, counts, mask=mask)
    words = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    num_words = words_of_row(vocab_size)
    there = words < num_words
    theirs = tl.load(marks_ptr + source * num_words + words, mask=there, other=0)
    own = tl.load(marks_ptr + target * num_words + words, mask=there, other=0)
    tl.store(marks_ptr + target * num_words + words, own | theirs, mask=there)
