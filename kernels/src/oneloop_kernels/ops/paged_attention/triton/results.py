"""Results of decode.py: partial ones of (row, key head) pairs that are cut among programs, and what is written.

Nobody counts arrivals: a partial result is complete when none of its words is ABSENT any more, and who has added it up
makes it ABSENT again, for the next layer. That is a store and a load, where a counter takes a fence and an atomic more.
A program waits only for programs before it, which wait for nobody before they have left what it waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.ops.paged_attention.triton.softmax import HIDDEN, LOG2_E

ABSENT = tl.constexpr(-1)
"""The bits of a NaN that no arithmetic yields."""
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def leave(
    acc, maximum, total, slot, partial_acc, partial_norm,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Store a partial result in a slot."""
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    mine = group < GROUP
    place = slot.to(tl.int64) * GROUP_ROWS + group
    inside = mine[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(partial_acc + place[:, None] * HEAD_DIM + dims[None, :], _bits(acc), mask=inside)
    tl.store(partial_norm + 2 * place, _bits(maximum), mask=mine)
    tl.store(partial_norm + 2 * place + 1, _bits(total), mask=mine)


@triton.jit
def _bits(values):
    """Of fp32 numbers, never ABSENT."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits == ABSENT, NAN_BITS, bits)


@triton.jit
def _any_absent(bits):
    """As unsigned numbers, ABSENT is the largest: one instruction a word."""
    return tl.max(bits.to(tl.uint32, bitcast=True)) == 0xFFFFFFFF


@triton.jit
def merge(
    first, last, first_slot, partial_acc, partial_norm, row, head, out, sinks,
    shared_chunks, shared_acc, shared_norm, max_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    MERGE: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Add up the partial results of the programs first … last, MERGE at a time, and write the pair's result.

    Volatile loads go past the L1 cache: other multiprocessors write this memory while the kernel runs.
    """
    group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    acc = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    maximum = tl.full([GROUP_ROWS], HIDDEN, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    for index in range(first, last + 1, MERGE):
        programs = index + tl.arange(0, MERGE)
        slots = tl.where(programs == first, first_slot, 2 * programs)
        places = slots.to(tl.int64)[:, None] * GROUP_ROWS + group[None, :]
        there = (programs <= last)[:, None] & (group < GROUP)[None, :]
        norms = partial_norm + 2 * places
        inside = there[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        accs = partial_acc + places[:, :, None] * HEAD_DIM + dims[None, None, :]
        maxima = tl.load(norms, mask=there, other=0, volatile=True)
        totals = tl.load(norms + 1, mask=there, other=0, volatile=True)
        parts = tl.load(accs, mask=inside, other=0, volatile=True)
        while _any_absent(parts) | _any_absent(maxima) | _any_absent(totals):
            maxima = tl.load(norms, mask=there, other=0, volatile=True)
            totals = tl.load(norms + 1, mask=there, other=0, volatile=True)
            parts = tl.load(accs, mask=inside, other=0, volatile=True)
        tl.store(norms, ABSENT, mask=there)
        tl.store(norms + 1, ABSENT, mask=there)
        tl.store(accs, ABSENT, mask=inside)
        maxima = tl.where(there, maxima.to(tl.float32, bitcast=True), HIDDEN)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_maximum[None, :])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights * totals.to(tl.float32, bitcast=True), 0)
        acc = acc * shrink[:, None] + tl.sum(parts.to(tl.float32, bitcast=True) * weights[:, :, None], 0)
        maximum = new_maximum
    write(
        acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows,
        HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIM, HAS_SINKS, SHARED, WAIT,
    )  # fmt: skip


@triton.jit
def write(
    acc, maximum, total, row, head, out, sinks, shared_chunks, shared_acc, shared_norm, max_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Add what the row shares with others, and the sinks; normalise; store. acc: [ROWS, DIM]."""
    group = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    heads = head * GROUP + group
    mine = group < GROUP
    inside = mine[:, None] & (dims < HEAD_DIM)[None, :]
    if SHARED > 0:
        if WAIT:
            tl.extra.cuda.gdc_wait()
        chunks = tl.load(shared_chunks + row)
        for chunk in tl.static_range(SHARED):
            there = mine & (chunk < chunks)
            places = (chunk * max_rows + row).to(tl.int64) * HEADS + heads
            other_maximum = tl.load(shared_norm + 2 * places, mask=there, other=HIDDEN, cache_modifier=".cg")
            other_total = tl.load(shared_norm + 2 * places + 1, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(
                shared_acc + places[:, None] * HEAD_DIM + dims[None, :],
                mask=there[:, None] & inside,
                other=0.0,
                cache_modifier=".cg",
            )
            new_maximum = tl.maximum(maximum, other_maximum)
            weight = tl.exp2(other_maximum - new_maximum)
            shrink = tl.exp2(maximum - new_maximum)
            total = total * shrink + other_total * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            maximum = new_maximum
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.exp2(sink - new_maximum)
        acc = acc * shrink[:, None]
    total = tl.where(mine, total, 1.0)
    place = (row.to(tl.int64) * HEADS + heads) * HEAD_DIM
    result = acc / total[:, None]
    tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
