"""Attention of blocks of queries: rows with several queries, and what many rows with one query share.

A block is TOKENS consecutive tokens of the step times the query heads of one key head: their products with a tile of
keys are one matrix product of BLOCK_M rows. Programs of a fixed grid draw the planned items (planning.py), heaviest
first, one key head at a time, from a counter that the last program to leave sets back to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.paged_attention.triton.planning import ITEM_FIELDS
from oneloop_kernels.ops.paged_attention.triton.softmax import (
    HIDDEN,
    LOG2_E,
    absorb,
    as_operand,
    key_offsets,
    table_entries,
)


@triton.jit
def tiles_kernel(
    qkv, cache, descriptor, out, norm, sinks, block_tables, table_stride, items, num_items, counters, max_rows,
    stride_block, stride_token, stride_head, scale_log2, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program of the grid.

    PARTIAL: every query sees every key of the item; out is [chunks, max_rows, HEADS, HEAD_DIM] fp32, not normalised,
    norm [chunks, max_rows, HEADS, 2] fp32: maxima and total. Otherwise causal, out as in the contract, norm unused.
    value_scale: factor on the results of the second kind.
    descriptor: of the cache, [blocks, BLOCK_SIZE, heads, HEAD_DIM], boxes of one head's BLOCK_N tokens; only with TMA.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    work = tl.atomic_add(counters, 1, sem="relaxed")
    num_work = tl.load(num_items) * KV_HEADS
    while work < num_work:
        following = tl.atomic_add(counters, 1, sem="relaxed")
        _attend(
            work // KV_HEADS, work % KV_HEADS, qkv, cache, descriptor, out, norm, sinks, block_tables, table_stride,
            items, max_rows, stride_block, stride_token, stride_head, scale_log2, value_scale,
            HEADS, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WINDOW, SOFT_CAP, HAS_SINKS, PARTIAL, TMA,
            STAGES,
        )  # fmt: skip
        work = following
    left = tl.atomic_add(counters + 1, 1, sem="relaxed")
    if left == tl.num_programs(0) - 1:
        tl.atomic_xchg(counters, 0, sem="relaxed")
        tl.atomic_xchg(counters + 1, 0, sem="relaxed")


@triton.jit
def _attend(
    number, head, qkv, cache, descriptor, out, norm, sinks, block_tables, table_stride, items, max_rows,
    stride_block, stride_token, stride_head, scale_log2, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One item, one key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    item = items + number * ITEM_FIELDS
    first_token = tl.load(item).to(tl.int64)
    tokens = tl.load(item + 1)
    table = block_tables + tl.load(item + 2).to(tl.int64) * table_stride
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    position = tl.load(item + 5)
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    token = lanes // GROUP
    heads = head * GROUP + lanes % GROUP
    live = token < tokens
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    query = ((first_token + token) * (HEADS + 2 * KV_HEADS) + heads) * HEAD_DIM
    q = as_operand(tl.load(qkv + query[:, None] + dims[None, :], mask=inside, other=0.0), cache)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    maximum = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    clear = end
    if not PARTIAL:
        clear = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, begin)
    acc, maximum, total = _walk(
        begin, clear, end, acc, maximum, total, q, position + token, cache, descriptor, table, head,
        stride_block, stride_token, stride_head, scale_log2,
        KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, WINDOW > 0, TMA and WINDOW == 0, STAGES,
    )  # fmt: skip
    if not PARTIAL:
        acc, maximum, total = _walk(
            clear, end, end, acc, maximum, total, q, position + token, cache, descriptor, table, head,
            stride_block, stride_token, stride_head, scale_log2,
            KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, SOFT_CAP, True, False, STAGES,
        )  # fmt: skip
    if PARTIAL:
        chunk = tl.load(item + 6)
        place = (chunk.to(tl.int64) * max_rows + first_token + token) * HEADS + heads
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
        tl.store(norm + 2 * place, maximum, mask=live)
        tl.store(norm + 2 * place + 1, total, mask=live)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
            new_maximum = tl.maximum(maximum, sink)
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + tl.exp2(sink - new_maximum)
            acc = acc * shrink[:, None]
        place = ((first_token + token) * HEADS + heads) * HEAD_DIM
        result = (acc / total[:, None] * value_scale).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + dims[None, :], result, mask=inside)


@triton.jit
def _walk(
    begin, stop, length, acc, maximum, total, q, query_positions, cache, descriptor, table, head,
    stride_block, stride_token, stride_head, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Absorb the tiles of keys from begin up to stop. Without MASKED every query sees them and they are full."""
    dims = tl.arange(0, DIM)
    keys = cache + head.to(tl.int64) * stride_head
    values = keys + KV_HEADS * stride_head
    blocks = table_entries(table, begin, length, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        positions = start + tl.arange(0, BLOCK_N)
        if TMA:
            box = start % BLOCK_SIZE
            k = descriptor.load([blocks, box, head, 0]).reshape([BLOCK_N, DIM])
            v = descriptor.load([blocks, box, KV_HEADS + head, 0]).reshape([BLOCK_N, DIM])
        else:
            valid = positions < length
            offsets = key_offsets(blocks, start, stride_block, stride_token, BLOCK_SIZE, BLOCK_N)
            places = offsets[:, None] + dims[None, :]
            if MASKED:
                inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
                k = tl.load(keys + places, mask=inside, other=0.0)
                v = tl.load(values + places, mask=inside, other=0.0)
            elif DIM != HEAD_DIM:
                k = tl.load(keys + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
                v = tl.load(values + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            else:
                k = tl.load(keys + places)
                v = tl.load(values + places)
        blocks = table_entries(table, start + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        seen = True
        if MASKED:
            seen = positions[None, :] <= query_positions[:, None]
            if WINDOW > 0:
                seen = seen & (positions[None, :] > query_positions[:, None] - WINDOW)
        acc, maximum, total = absorb(
            products, seen, scale_log2, v.to(q.dtype), acc, maximum, total, MASKED, SOFT_CAP, False
        )
    return acc, maximum, total
