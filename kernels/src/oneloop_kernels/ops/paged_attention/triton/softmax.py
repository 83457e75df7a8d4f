"""What both attention kernels share: addresses in the paged cache, and one step of the online softmax.

Scores are kept in the base-2 domain: s · log2(e), so that weights are exp2 of differences.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)
"""Score of a key that a query does not see; finite, so that a tile without any key in sight yields no NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


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
def capped(scores, scale_log2, SOFT_CAP: tl.constexpr):
    """Raw products to scores in the base-2 domain. SOFT_CAP: 0 for none, then scale_log2 is scale · log2(e);
    else scale_log2 is 2 · log2(e) · scale / SOFT_CAP and tanh(x) = 1 − 2 / (exp(2x) + 1)."""
    if SOFT_CAP > 0:
        doubled = tl.minimum(scores * scale_log2, 60.0)
        return SOFT_CAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    else:
        return scores * scale_log2


@triton.jit
def absorb(scores, values, acc, maximum, sums, BY_COLUMN: tl.constexpr):
    """Add a tile. scores: [M, N] base 2; values: [N, D]; acc: [M, D] fp32; maximum: [M] fp32. → the new three.

    sums: [M] fp32, the weights' sums. BY_COLUMN: [M, N], to be added up along N once, after the last tile: worth its
    registers where the columns are spread over several warps.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    if BY_COLUMN:
        sums = sums * shrink[:, None] + weights
    else:
        sums = sums * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_maximum, sums
