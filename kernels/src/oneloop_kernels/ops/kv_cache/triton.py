"""Block copies on the GPU: one launch for all layers and pairs; the grid depends on no count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from oneloop_kernels.launch import num_sms, pdl_options

if TYPE_CHECKING:
    import torch


@triton.jit(do_not_specialize=["max_copies"])
def copy_blocks_kernel(
    cache,
    source,
    target,
    count,
    num_layers,
    layer_stride,
    block_stride,
    max_copies,
    BLOCK_ELEMENTS: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Programs share out the pieces of PIECE elements of all blocks, pair by pair, layer by layer."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_copies = max_copies.to(tl.int64)
    if HAS_COUNT:
        num_copies = tl.minimum(tl.load(count).to(tl.int64), num_copies)
    PIECES: tl.constexpr = (BLOCK_ELEMENTS + PIECE - 1) // PIECE
    element = tl.arange(0, PIECE)
    for index in range(tl.program_id(0).to(tl.int64), num_copies * num_layers * PIECES, tl.num_programs(0)):
        pair = index // (num_layers * PIECES)
        layer = index // PIECES % num_layers
        inside = index % PIECES * PIECE + element
        base = cache + layer * layer_stride
        read = base + tl.load(source + pair).to(tl.int64) * block_stride
        written = base + tl.load(target + pair).to(tl.int64) * block_stride
        mask = inside < BLOCK_ELEMENTS
        tl.store(written + inside, tl.load(read + inside, mask=mask), mask=mask)


PIECE_BYTES: Final = 8192
"""What a program copies at once: four 16-byte accesses of each of 128 threads."""
PROGRAMS_PER_SM: Final = 8


class TritonKvCacheOps:
    """See the contract."""

    __slots__ = ()

    def copy_blocks(
        self,
        cache: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        count: torch.Tensor | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        programs_per_sm: int = PROGRAMS_PER_SM,
        num_warps: int = 4,
    ) -> None:
        """See the contract. The last three are for measuring."""
        num_layers, num_blocks, *block_shape = cache.shape
        block_elements = block_shape[0] * block_shape[1] * block_shape[2]
        if num_blocks > 1 and cache.stride(1) != block_elements:
            raise ValueError(
                f"blocks of {block_elements} elements lie {cache.stride(1)} apart: cache must be dense"
            )
        piece = min(piece_bytes // cache.element_size(), triton.next_power_of_2(block_elements))
        most = len(source) * num_layers * triton.cdiv(block_elements, piece)
        if most == 0:
            return
        copy_blocks_kernel[(min(most, programs_per_sm * num_sms(cache.device)),)](
            cache,
            source,
            target,
            source if count is None else count,  # not read without a count
            num_layers,
            cache.stride(0),
            cache.stride(1),
            len(source),
            BLOCK_ELEMENTS=block_elements,
            PIECE=piece,
            HAS_COUNT=count is not None,
            num_warps=num_warps,
            **pdl_options(cache.device),
        )


TRITON: Final = TritonKvCacheOps()
