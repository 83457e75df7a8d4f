"""Embedding rows on the GPU."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import pdl_options

PIECE: Final = 1024
"""Elements of a row that one program copies: one 16-byte access of each of 128 threads for the short types."""


@triton.jit
def copy_row(token_ids, weight, out, token, element, vocab_size, row_stride, size):
    """Elements of the row of one token. token: int64."""
    token_id = tl.load(token_ids + token).to(tl.int64)
    row = tl.minimum(tl.maximum(token_id, 0), vocab_size - 1)
    mask = element < size
    tl.store(out + token * size + element, tl.load(weight + row * row_stride + element, mask=mask), mask=mask)


@triton.jit
def embedding_kernel(
    token_ids,
    weight,
    out,
    vocab_size,
    row_stride,
    size,
    PIECE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One piece of the row of one token."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    copy_row(token_ids, weight, out, token, element, vocab_size, row_stride, size)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See the contract."""
    vocab_size, size = weight.shape
    out = torch.empty(len(token_ids), size, dtype=weight.dtype, device=weight.device)
    if len(token_ids):
        embedding_kernel[(len(token_ids), triton.cdiv(size, PIECE))](
            token_ids,
            weight,
            out,
            vocab_size,
            weight.stride(0),
            size,
            PIECE=PIECE,
            num_warps=4,
            **pdl_options(weight.device),
        )
    return out
