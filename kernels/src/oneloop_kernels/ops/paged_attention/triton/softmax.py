"""What both attention kernels share: addresses in the paged cache, and one step of the online softmax.

Maxima are kept in the base-2 domain, s · log2(e), so that weights are exp2 of differences. The factor into that domain
is applied within that difference, by one fused multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)
"""Score of a key that a query does not see; finite, so that a tile without any key in sight yields no NaN."""
FLOAT16_MAX = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_operand(queries, cache):
    """Queries in the type in which they are multiplied with what the cache holds: their own, or float16 where that is
    8 bits. Both 16-bit types hold those numbers exactly; one instruction makes float16 of two, bfloat16 takes five.
    """
    if cache.dtype.element_ty == tl.float8e4nv:
        if queries.dtype == tl.bfloat16:
            queries = tl.clamp(queries.to(tl.float32), -FLOAT16_MAX, FLOAT16_MAX, tl.PropagateNan.ALL)
            queries = queries.to(tl.float16)
    return queries


@triton.jit
def table_entries(
    table, start, limit, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Blocks of the tokens at start + 0 … BLOCK_N − 1, as far as they are below limit; one number where they share it.

    Loops fetch the entries of the next tile before they use a tile's keys: in the loop's own order an address would
    wait for its entry, and Triton's pipeline would be half as deep.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < limit, other=0)
    else:
        positions = start + tl.arange(0, BLOCK_N)
        return tl.load(table + positions // BLOCK_SIZE, mask=positions < limit, other=0)


@triton.jit
def key_offsets(
    blocks, start, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """[BLOCK_N] int64: where the tokens at start + 0 … BLOCK_N − 1 lie in the cache. blocks: from table_entries."""
    if BLOCK_SIZE % BLOCK_N == 0:
        inner = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        inner = (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    return blocks.to(tl.int64) * stride_block + inner.to(tl.int64) * stride_token


@triton.jit
def absorb(
    products,
    seen,
    scale_log2,
    values,
    acc,
    maximum,
    sums,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):
    """Add a tile. products: [M, N] of queries and keys; values: [N, D]; acc: [M, D] fp32; maximum: [M] fp32. → the new
    three.

    seen: what a query sees, [M, N] or one that is broadcast to it; only used with MASKED. scale_log2: into the base-2
    domain, scale · log2(e); with SOFT_CAP (0 for none) 2 · log2(e) · scale / SOFT_CAP, for tanh(x) is
    1 − 2 / (exp(2x) + 1).
    sums: [M] fp32, the weights' sums. BY_COLUMN: [M, N], to be added up along N once, after the last tile: worth its
    registers where the columns are spread over several warps.
    """
    if SOFT_CAP > 0:
        doubled = tl.minimum(products * scale_log2, 60.0)
        products = SOFT_CAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
        factor = 1.0
    else:
        factor = scale_log2
    if MASKED:
        products = tl.where(seen, products, HIDDEN)
    new_maximum = tl.maximum(maximum, tl.max(products, 1) * factor)
    weights = tl.exp2(products * factor - new_maximum[:, None])
    if MASKED:
        # HIDDEN · factor is rounded in the maximum and exact in the fused difference: where a query sees nothing yet,
        # that difference is not 0 but as large as HIDDEN's last place, and its power infinite.
        weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(maximum - new_maximum)
    if BY_COLUMN:
        sums = sums * shrink[:, None] + weights
    else:
        sums = sums * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_maximum, sums
