"""Bans, bias and penalties: the edited logits of the rows that ask for any, in float32 beside the model's own."""

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


@triton.jit(do_not_specialize=["penalties", "num_tiles"])
def edit_kernel(
    logits_ptr, edited_ptr, row_edited_ptr, history_ptr, header_ptr, sample_slot_ptr, output_index_ptr,
    floats_ptr, ints_ptr, bias_token_ptr, bias_value_ptr, banned_token_ptr, logits_stride, vocab_size,
    penalties, num_tiles,
    NUM_SAMPLES: tl.constexpr, MAX_BIAS: tl.constexpr, MAX_BANNED: tl.constexpr,
    BLOCK: tl.constexpr, LIST_BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """edited[i] = the row's logits + bans + bias, then penalized. Grid: [splits, bucket], num_tiles · BLOCK tokens.

    penalties: whether the step has any: else there may be no history.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    ints = ints_ptr + slot * COLUMNS
    num_banned = tl.load(ints + NUM_BANNED)
    if tl.load(output_index_ptr + row) >= tl.load(ints + MIN_TOKENS):
        num_banned = 0
    num_bias = tl.load(ints + NUM_BIAS)
    has_lists = (num_banned + num_bias) > 0
    is_penalized = (tl.load(ints + PENALIZED) != 0) & (penalties != 0)
    wanted = has_lists | is_penalized
    if tl.program_id(0) == 0:
        tl.store(row_edited_ptr + row, wanted.to(tl.int32))
    if not wanted:
        return
    floats = floats_ptr + slot * COLUMNS
    repetition, presence = tl.load(floats + REPETITION), tl.load(floats + PRESENCE)
    frequency = tl.load(floats + FREQUENCY)
    logits, edited = logits_ptr + row * logits_stride, edited_ptr + row * vocab_size
    first = tl.program_id(0) * num_tiles * BLOCK
    last = tl.minimum(first + num_tiles * BLOCK, vocab_size)
    lanes = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        columns = start + lanes
        mask = columns < last
        x = tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32)
        if is_penalized and not has_lists:
            history = tl.load(history_ptr + slot * vocab_size + columns, mask=mask, other=0)
            x = _penalized(x, history, repetition, presence, frequency)
        tl.store(edited + columns, x, mask=mask)
    if not has_lists:
        return
    tl.debug_barrier()
    _add_lists(
        edited, first, last, slot, num_banned, num_bias, bias_token_ptr, bias_value_ptr, banned_token_ptr,
        MAX_BIAS, MAX_BANNED, LIST_BLOCK,
    )  # fmt: skip
    if is_penalized:
        tl.debug_barrier()
        for start in range(first, last, BLOCK):
            columns = start + lanes
            mask = columns < last
            # Past the L1 cache: the atomics changed what lies behind it.
            x = tl.load(edited + columns, mask=mask, other=0.0, cache_modifier=".cg")
            history = tl.load(history_ptr + slot * vocab_size + columns, mask=mask, other=0)
            x = _penalized(x, history, repetition, presence, frequency)
            tl.store(edited + columns, x, mask=mask)
