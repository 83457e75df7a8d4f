"""Steps without a random row: one argmax, whose last program to arrive writes the row's token."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.triton.common import (
    COLUMNS,
    INF,
    MAX_SPLITS,
    NEG_INF,
    NO_TOKEN,
    PENALIZED,
    load_row,
    was_edited,
)


@triton.jit
def write_token(
    row, slot, token, is_bad, token_out_ptr, last_token_ptr, ints, history_ptr, vocab_size, penalties
):
    """−1 tells the host of NaN or +∞; the step that may be in flight already computes with the slot's last token."""
    tl.store(token_out_ptr + row, tl.where(is_bad, -1, token))
    tl.store(last_token_ptr + slot, token)
    if penalties != 0:
        if tl.load(ints + PENALIZED) != 0:
            tl.atomic_add(history_ptr + slot * vocab_size + token, 1, sem="relaxed")


@triton.jit
def _maximum_of_tiles(logits, columns, num_tiles, vocab_size, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Per lane: the maximum of its tokens and its first tile; NaN where one is. AHEAD: the next tile is loaded too."""
    best = tl.full((BLOCK,), NEG_INF, tl.float32)
    best_tile = tl.zeros((BLOCK,), tl.int32)
    if AHEAD:
        following = tl.load(logits + columns, mask=columns < vocab_size, other=NEG_INF)
    for tile in range(num_tiles):
        if AHEAD:
            x = following.to(tl.float32)
            ahead = columns + (tile + 1) * BLOCK
            ahead_mask = (ahead < vocab_size) & (tile + 1 < num_tiles)
            following = tl.load(logits + ahead, mask=ahead_mask, other=NEG_INF)
        else:
            here = columns + tile * BLOCK
            x = load_row(logits, here, here < vocab_size)
        best_tile = tl.where(x > best, tile, best_tile)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    return best, best_tile


@triton.jit(do_not_specialize=["edits", "penalties", "splits", "num_tiles"])
def greedy_kernel(
    logits_ptr, edited_ptr, row_edited_ptr, history_ptr, header_ptr, sample_slot_ptr, ints_ptr,
    partial_max_ptr, partial_token_ptr, ticket_ptr, token_out_ptr, last_token_ptr, logits_stride,
    vocab_size, edits, penalties, splits, num_tiles,
    NUM_SAMPLES: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """token_out[i] = argmax of row i. Grid: [splits, bucket]; num_tiles · BLOCK tokens each.

    edits, penalties: whether the step has any.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    split = tl.program_id(0)
    columns = split * (num_tiles * BLOCK) + tl.arange(0, BLOCK)
    if was_edited(row_edited_ptr, row, edits):
        edited = edited_ptr + row * vocab_size  # twice as wide: no registers for two tiles
        best, best_tile = _maximum_of_tiles(edited, columns, num_tiles, vocab_size, False, BLOCK)
    else:
        logits = logits_ptr + row * logits_stride
        best, best_tile = _maximum_of_tiles(logits, columns, num_tiles, vocab_size, True, BLOCK)
    is_nan = tl.max((best != best).to(tl.int32), 0) > 0
    best = tl.where(best != best, NEG_INF, best)
    maximum = tl.max(best, 0)
    token = tl.min(tl.where(best == maximum, columns + best_tile * BLOCK, NO_TOKEN), 0)
    partials = partial_max_ptr + row * MAX_SPLITS
    tokens = partial_token_ptr + row * MAX_SPLITS
    tl.store(partials + split, tl.where(is_nan, float("nan"), maximum))
    tl.store(tokens + split, token)
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr + row, 1, sem="acq_rel") != splits - 1:
        return
    tl.store(ticket_ptr + row, 0)
    lanes = tl.arange(0, MAX_SPLITS)
    mask = lanes < splits
    # Past the L1 cache, which knows nothing of the other programs' stores.
    parts = tl.load(partials + lanes, mask=mask, other=NEG_INF, cache_modifier=".cg")
    part_tokens = tl.load(tokens + lanes, mask=mask, other=NO_TOKEN, cache_modifier=".cg")
    is_bad = tl.max((~(parts < INF)).to(tl.int32), 0) > 0
    maximum = tl.max(tl.where(parts < INF, parts, NEG_INF), 0)
    token = tl.min(tl.where(parts == maximum, part_tokens, NO_TOKEN), 0)
    token = tl.where(is_bad, 0, token)
    slot = tl.load(sample_slot_ptr + row).to(tl.int64)
    ints = ints_ptr + slot * COLUMNS
    write_token(
        row, slot, token, is_bad, token_out_ptr, last_token_ptr, ints, history_ptr, vocab_size, penalties
    )
