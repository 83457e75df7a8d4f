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
def key_offsets(
    table, start, positions, valid, stride_block, stride_token,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N] int64: where the tokens at positions = start + 0 … BLOCK_N − 1 lie in the cache.

    valid: where the block table may be read; only used with MASKED. start is a multiple of BLOCK_N.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        return block * stride_block + (start % BLOCK_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64) * stride_token
    else:
        if MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE)
        return blocks.to(tl.int64) * stride_block + (positions % BLOCK_SIZE).to(tl.int64) * stride_token


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
def absorb(scores, values, acc, maximum, total):
    """Add a tile. scores: [M, N] base 2; values: [N, D]; acc: [M, D] fp32; maximum, total: [M] fp32. → the new three."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_maximum, total
