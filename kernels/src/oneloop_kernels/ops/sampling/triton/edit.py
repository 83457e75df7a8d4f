"""Bans, bias and penalties: edited logits of the tokens that a row's are about, in float32 beside the model's own.

A slot's marks say which tokens these are: of its lists, prompt and output. Where a list does not bind, a marked token's
edited logit is the model's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    FREQUENCY,
    MIN_TOKENS,
    NEG_INF,
    NUM_BANNED,
    NUM_BIAS,
    PENALIZED,
    PRESENCE,
    REPETITION,
    edited_row,
    words_of_row,
)


@triton.jit
def _penalized(x, history, repetition, presence, frequency):
    """Repetition divides positive and multiplies negative logits of tokens seen; the rest counts the output."""
    counts = history & 0x7FFFFFFF
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where(history != 0, repeated, x)
    x -= counts.to(tl.float32) * frequency
    return x - tl.where(counts > 0, presence, 0.0)


@triton.jit
def _add_lists(
    edited, first, last, slot, num_banned, num_bias, bias_token_ptr, bias_value_ptr, banned_token_ptr,
    MAX_BIAS: tl.constexpr, MAX_BANNED: tl.constexpr, LIST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Bans (−∞) and bias of the tokens from `first` to `last`.

    By atomics, so that a token which stands in a list twice, or in both, gets the sum.
    """
    entries = tl.arange(0, LIST_BLOCK)
    for start in range(0, num_banned, LIST_BLOCK):
        at = start + entries
        mask = at < num_banned
        token = tl.load(banned_token_ptr + slot * MAX_BANNED + at, mask=mask, other=-1)
        value = tl.full((LIST_BLOCK,), NEG_INF, tl.float32)
        tl.atomic_add(edited + token, value, mask=(token >= first) & (token < last), sem="relaxed")
    for start in range(0, num_bias, LIST_BLOCK):
        at = start + entries
        mask = at < num_bias
        token = tl.load(bias_token_ptr + slot * MAX_BIAS + at, mask=mask, other=-1)
        value = tl.load(bias_value_ptr + slot * MAX_BIAS + at, mask=mask, other=0.0)
        tl.atomic_add(edited + token, value, mask=(token >= first) & (token < last), sem="relaxed")


@triton.jit
def _edit_marked(source, edited, history, first, words, is_penalized, repetition, presence, frequency):
    """edited = source, penalized where that is wanted, of the tokens marked in words ([n], int32).

    first: each word's first token. A lane takes the lowest bit of its word, round after round.
    """
    while tl.max((words != 0).to(tl.int32), 0) > 0:
        there = words != 0
        lowest = words & -words  # the exponent of a power of two (of −2³¹ too) is the place of its bit
        place = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        token = first + place
        # Past the L1 cache: in a second round atomics changed what lies behind it.
        x = tl.load(source + token, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        if is_penalized:
            seen = tl.load(history + token, mask=there, other=0)
            x = _penalized(x, seen, repetition, presence, frequency)
        tl.store(edited + token, x, mask=there)
        words ^= lowest


@triton.jit(do_not_specialize=["penalties"])
def edit_kernel(
    logits_ptr, edited_ptr, marks_ptr, row_edited_ptr, history_ptr, header_ptr, sample_slot_ptr, output_index_ptr,
    floats_ptr, ints_ptr, bias_token_ptr, bias_value_ptr, banned_token_ptr, logits_stride, vocab_size, penalties,
    NUM_SAMPLES: tl.constexpr, MAX_BIAS: tl.constexpr, MAX_BANNED: tl.constexpr,
    WORDS: tl.constexpr, LIST_BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """edited[i] = the row's logits + bans + bias, then penalized; of marked tokens only, nobody reads the others.

    Grid: [ceil(words of a row / WORDS), bucket]. penalties: whether the step has any: else there may be no history.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    # All that can be is loaded before anything is waited for.
    num_samples = tl.load(header_ptr + NUM_SAMPLES)
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    output_index = tl.load(output_index_ptr + row)
    if row >= num_samples:
        return
    logits, edited, marks = edited_row(
        logits_ptr + row * logits_stride, edited_ptr, marks_ptr, row, slot, vocab_size
    )
    places = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = tl.load(marks + places, mask=places < words_of_row(vocab_size), other=0)
    ints, floats = ints_ptr + slot * COLUMNS, floats_ptr + slot * COLUMNS
    num_banned, num_bias = tl.load(ints + NUM_BANNED), tl.load(ints + NUM_BIAS)
    min_tokens, penalized = tl.load(ints + MIN_TOKENS), tl.load(ints + PENALIZED)
    repetition, presence = tl.load(floats + REPETITION), tl.load(floats + PRESENCE)
    frequency = tl.load(floats + FREQUENCY)
    num_banned = tl.where(output_index >= min_tokens, 0, num_banned)
    has_lists = (num_banned + num_bias) > 0
    is_penalized = (penalized != 0) & (penalties != 0)
    wanted = has_lists | is_penalized
    if tl.program_id(0) == 0:
        tl.store(row_edited_ptr + row, wanted.to(tl.int32))
    if not wanted:
        return
    history = history_ptr + slot * vocab_size
    first_tokens = places * 32
    at_once = is_penalized & (not has_lists)
    _edit_marked(logits, edited, history, first_tokens, words, at_once, repetition, presence, frequency)
    if not has_lists:
        return
    tl.debug_barrier()
    first = tl.program_id(0) * (WORDS * 32)
    last = tl.minimum(first + WORDS * 32, vocab_size)
    _add_lists(
        edited, first, last, slot, num_banned, num_bias, bias_token_ptr, bias_value_ptr, banned_token_ptr,
        MAX_BIAS, MAX_BANNED, LIST_BLOCK,
    )  # fmt: skip
    if is_penalized:
        tl.debug_barrier()
        _edit_marked(edited, edited, history, first_tokens, words, True, repetition, presence, frequency)
