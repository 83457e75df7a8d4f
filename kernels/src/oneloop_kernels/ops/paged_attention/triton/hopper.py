"""Launches of the kernels that only Hopper runs: stream.py, prefill.py and ordered.py.

Both read the cache as a matrix whose rows are the heads of its tokens, in the order block, head (keys' before
values'), token; so blocks must lie densely, by head. Kernels are imported when they are launched: the interpreter has
none of this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from oneloop_kernels.ops.float8 import FP8

if TYPE_CHECKING:
    from oneloop_kernels.ops.paged_attention import AttentionShape

_HEAD_DIM: Final = 128
_HALF: Final = 64
_BOX_BYTES: Final = 128
"""Of a box's row."""
_MERGE: Final = 8
"""Partial results that stream.py fetches at a time."""
_REGISTERS: Final = 65_536
"""Of a multiprocessor."""
_STREAM_THREADS: Final = 8 * 32
"""What a program of stream.py holds registers for: four warps, and the one that copies is given four too."""
_RING, _NARROW_RING = 4, 2
"""Tiles in prefill.py's rings, of 16 bits and of 8, where the cache has 8."""
QUERIES: Final = 8
"""Least rows of a matrix product's right operand; query heads of a key head are filled up to it."""


def fits(shape: AttentionShape, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether the kernels compute attention of this shape; of a cache of 8 bits stream.py and prefill.py do."""
    size = shape.block_size
    return (
        dtype in (torch.bfloat16, torch.float16)
        and cache_dtype in (dtype, FP8)
        and shape.head_dim == _HEAD_DIM
        and shape.num_heads // shape.num_kv_heads in (1, 2, 4, 8)
        and shape.sliding_window is None
        and shape.soft_cap is None
        and size % 8 == 0
        and (_HALF % size == 0 or size % _HALF == 0)
    )


def heads_together(shape: AttentionShape, most: int) -> int:
    """How many neighbouring key heads stream.py takes at once of a cache of 8 bits: at most `most`, a power of two."""
    group = shape.num_heads // shape.num_kv_heads
    return min(most, math.gcd(shape.num_kv_heads, max(QUERIES // group, 1)))


def lies_densely(cache: torch.Tensor) -> bool:
    """Whether a layer's cache [num_blocks, block_size, heads, head_dim] is the matrix that the kernels read."""
    return cache.transpose(1, 2).is_contiguous()


def stream_registers(programs_per_sm: int) -> int:
    """Of a thread of stream.py, so that as many programs fit a multiprocessor: a multiple of 8."""
    return min(128, _REGISTERS // (programs_per_sm * _STREAM_THREADS) // 8 * 8)


def launch_stream(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, shape: AttentionShape, *arguments: object,
    programs: int, programs_per_sm: int, tile: int, together: int, stages: int, beside: bool, pdl: dict[str, bool],
) -> None:  # fmt: skip
    """stream.py on one layer. arguments: what it takes after out."""
    from oneloop_kernels.ops.paged_attention.triton.stream import stream_kernel

    queries = qkv.view(-1, _HEAD_DIM)
    box = min(_HALF, shape.block_size, tile // together)
    narrow = cache.dtype is FP8
    stream_kernel[(programs,)](
        _tensor_map(queries, QUERIES, _HALF), _narrow_map(cache, together, box) if narrow else _cache_map(cache), out,
        *arguments,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size, BOX=box, QUERIES=QUERIES,
        TILE=tile, TOGETHER=together, STAGES=stages, MERGE=_MERGE, BESIDE=beside,
        num_warps=4, maxnreg=stream_registers(programs_per_sm), **pdl,
    )  # fmt: skip


def launch_prefill(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, shape: AttentionShape, *arguments: object,
    programs: int, ring: int, pdl: dict[str, bool],
) -> None:  # fmt: skip
    """prefill.py on one layer. arguments: what it takes after out. ring: of a cache of 8 bits it is _RING."""
    from oneloop_kernels.ops.paged_attention.triton.prefill import prefill_kernel

    group = shape.num_heads // shape.num_kv_heads
    narrow = cache.dtype is FP8
    prefill_kernel[(programs,)](
        _tensor_map(qkv, _HALF // group, group, _HALF), _cache_map(cache), out, *arguments,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size,
        BOX=min(_HALF, shape.block_size), RING=_RING if narrow else ring, NARROW_RING=_NARROW_RING if narrow else 0,
        num_warps=4, maxnreg=_REGISTERS // (512 if narrow else 384) // 8 * 8, **pdl,
    )  # fmt: skip


def launch_ordered_decode(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, shape: AttentionShape, *arguments: object,
    programs: int, stages: int, beside: bool, pdl: dict[str, bool],
) -> None:  # fmt: skip
    """ordered.decode_kernel on one layer. arguments: what it takes after out."""
    from oneloop_kernels.ops.paged_attention.triton.ordered import decode_kernel

    queries = qkv.view(-1, _HEAD_DIM)
    decode_kernel[(programs,)](
        _tensor_map(queries, QUERIES, _HALF), _cache_map(cache), out, *arguments,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size,
        BOX=min(_HALF, shape.block_size), QUERIES=QUERIES, STAGES=stages, BESIDE=beside,
        num_warps=4, maxnreg=128, **pdl,
    )  # fmt: skip


def launch_blocks(
    qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, shape: AttentionShape, *arguments: object,
    programs: int, queries: int, stages: int, pdl: dict[str, bool],
) -> None:  # fmt: skip
    """ordered.blocks_kernel on one layer. arguments: what it takes after out."""
    from oneloop_kernels.ops.paged_attention.triton.ordered import blocks_kernel

    group = shape.num_heads // shape.num_kv_heads
    blocks_kernel[(programs,)](
        _tensor_map(qkv, queries // group, group, _HALF), _cache_map(cache), out, *arguments,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size,
        BOX=min(_HALF, shape.block_size), QUERIES=queries, STAGES=stages, num_warps=4, maxnreg=128, **pdl,
    )  # fmt: skip


def _narrow_map(cache: torch.Tensor, together: int, box: int) -> object:
    """Of a cache of 8 bits as [heads of all blocks, tokens, head_dim]."""
    return _tensor_map(cache.transpose(1, 2).flatten(0, 1), together, box, _HEAD_DIM)


def _cache_map(cache: torch.Tensor) -> object:
    box = min(_HALF, cache.shape[1])
    return _tensor_map(cache.transpose(1, 2).view(-1, _HEAD_DIM), box, _BOX_BYTES // cache.itemsize)


def _tensor_map(tensor: torch.Tensor, *box: int) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = box_layout(tensor.dtype, *box)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), layout)


def box_layout(dtype: torch.dtype, *box: int) -> Any:
    """How a box lies in shared memory."""
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])
