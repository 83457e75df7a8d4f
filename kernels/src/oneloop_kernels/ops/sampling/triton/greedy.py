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
    edited_row,
    first_tile,
    kinds_of_row,
    mark,
    masked_row,
    next_tile,
    tile_logits,
    words_of_row,
)


@triton.jit
def write_token(
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
):
    """−1 tells the host of NaN or +∞; the step that may be in flight already computes with the slot's last token."""
    tl.store(token_out_ptr + row, tl.where(is_bad, -1, token))
    tl.store(last_token_ptr + slot, token)
    if penalties != 0:
        if tl.load(ints + PENALIZED) != 0:
            tl.atomic_add(history_ptr + slot * vocab_size + token, 1, sem="relaxed")
            mark(marks_ptr + slot * words_of_row(vocab_size), token, token >= 0)


@triton.jit
def _best_of_tiles(logits, first, num_tiles, vocab_size, BLOCK: tl.constexpr):
    """(whether one is NaN, the maximum of the others, its lowest id). logits: as `load_row` takes them."""
    columns = first + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NEG_INF, tl.float32)
    best_tile = tl.zeros((BLOCK,), tl.int32)
    following = first_tile(logits, first, vocab_size, num_tiles, BLOCK)
    for tile in range(num_tiles):
        x = tile_logits(following, BLOCK)
        ahead = first + (tile + 1) * BLOCK
        following = next_tile(logits, following, ahead, vocab_size, num_tiles - tile - 1, BLOCK)
        best_tile = tl.where(x > best, tile, best_tile)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    is_nan = tl.max((best != best).to(tl.int32), 0) > 0
    best = tl.where(best != best, NEG_INF, best)
    maximum = tl.max(best, 0)
    return is_nan, maximum, tl.min(tl.where(best == maximum, columns + best_tile * BLOCK, NO_TOKEN), 0)


@triton.jit(do_not_specialize=["edits", "penalties", "splits", "num_tiles"])
def greedy_kernel(
    logits_ptr, edited_ptr, marks_ptr, row_edited_ptr, history_ptr, header_ptr, sample_slot_ptr,
    mask_row_ptr, masks_ptr, ints_ptr, partial_max_ptr, partial_token_ptr, ticket_ptr, token_out_ptr,
    last_token_ptr, logits_stride, vocab_size, edits, penalties, splits, num_tiles,
    NUM_SAMPLES: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """token_out[i] = argmax of row i. Grid: [splits, bucket]; num_tiles · BLOCK tokens each.

    edits, penalties, MASKS: whether the step has any.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(header_ptr + NUM_SAMPLES):
        return
    split = tl.program_id(0)
    first = split * (num_tiles * BLOCK)
    logits = (logits_ptr + row * logits_stride,)
    kinds = kinds_of_row(row_edited_ptr, mask_row_ptr, row, edits, MASKS)
    if kinds != 0:
        slot = tl.load(sample_slot_ptr + row).to(tl.int64)
        with_edits = edited_row(logits[0], edited_ptr, marks_ptr, row, slot, vocab_size)
        if MASKS:
            with_edits = masked_row(with_edits, masks_ptr, mask_row_ptr, row, kinds, vocab_size)
        # Half tiles: no registers for whole ones.
        is_nan, maximum, token = _best_of_tiles(with_edits, first, num_tiles * 2, vocab_size, BLOCK // 2)
    else:
        is_nan, maximum, token = _best_of_tiles(logits, first, num_tiles, vocab_size, BLOCK)
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
