"""One row of x in 16 bits, made e4m3 by each program of the streaming kernel for itself, its norm before it.

To launch a kernel that does it once takes longer than to do it everywhere: a row is some KB, and weights are on their
way meanwhile. As `ops.fp8_linear.triton.quantize` rounds, so is rounded here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_ALIGNED = gl.constexpr(16)
"""Sizes are multiples of it."""


@gluon.jit
def scale_of_row(x_ptr, norm_ptr, in_size, eps, HAS_NORM: gl.constexpr, CHUNK: gl.constexpr):
    """inverse, scale, float32: what x is multiplied with before its norm's weight, what the result is divided by."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    places = gl.arange(0, CHUNK, layout)
    limit = in_size // _ALIGNED * _ALIGNED
    inverse = 1.0
    if HAS_NORM:
        squares = gl.zeros([CHUNK], gl.float32, layout)
        for start in range(0, limit, CHUNK):
            x = gl.load(x_ptr + start + places, mask=start + places < limit, other=0.0).to(gl.float32)
            squares += x * x
        inverse = gl.rsqrt(gl.sum(squares, 0) / in_size + eps)
    largest = gl.zeros([CHUNK], gl.float32, layout)
    for start in range(0, limit, CHUNK):
        x = _normed(x_ptr, norm_ptr, inverse, start + places, limit, HAS_NORM)
        largest = gl.maximum(largest, gl.abs(x))
    return inverse, gl.maximum(gl.max(largest, 0) / 448.0, 1e-12)


@gluon.jit
def put_block(
    x_ptr, norm_ptr, inverse, scale, column, in_size, target,
    HAS_NORM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The row's columns from `column` on into all rows of target, shared memory, e4m3 [BLOCK_M, BLOCK_K]."""
    across: gl.constexpr = BLOCK_K // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // across, across], [gl.num_warps(), 1], [1, 0])
    places = column + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    x = _normed(x_ptr, norm_ptr, inverse, places, in_size // _ALIGNED * _ALIGNED, HAS_NORM)
    values = gl.minimum(gl.maximum(x / scale, -448.0), 448.0)
    rows = gl.zeros([BLOCK_M, BLOCK_K], gl.float32, layout) + values[None, :]
    target.store(rows.to(gl.float8e4nv))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _normed(x_ptr, norm_ptr, inverse, places, limit, HAS_NORM: gl.constexpr):
    x = gl.load(x_ptr + places, mask=places < limit, other=0.0)
    wide = x.to(gl.float32)
    if HAS_NORM:
        weight = gl.load(norm_ptr + places, mask=places < limit, other=0.0)
        wide = ((wide * inverse).to(x.dtype) * weight).to(gl.float32)
    return wide
