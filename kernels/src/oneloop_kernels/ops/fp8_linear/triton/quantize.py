"""Rows → e4m3 with scales on a GPU, after what stands before a map: its norm, or the gate of the map before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.float8.triton import as_float8
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.silu_mul.triton import silu_mul_tile

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import Norm

_ELEMENTS_PER_THREAD = 16
_MAX_WARPS = 16
_LEAST_WARPS = 4


class Quantized(NamedTuple):
    """values: e4m3 [num_tokens, size], contiguous. scales: float32 [num_tokens] or [⌈size / BLOCK⌉, num_tokens]."""

    values: torch.Tensor
    scales: torch.Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_kernel(
    x_ptr, norm_ptr, out_ptr, scales_ptr, num_tokens, size, x_stride, eps,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, BY_BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """out, scales = quantised norm(x) or silu(gate) · up with x = [gate | up]. Grid: [num_tokens]. BLOCK ≥ size."""
    token = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = BLOCK // GROUP
    columns = tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < size
    if HAS_NORM:
        weight = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel asks for its weights while this one runs
        tl.extra.cuda.gdc_wait()
    places = x_ptr + token * x_stride + columns
    x = tl.load(places, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if GATED:
        up = tl.load(places + size, mask=mask, other=0.0).to(tl.float32)
        wide = silu_mul_tile(wide, up).to(x.dtype).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / size + eps)
        wide = ((wide * inverse).to(x.dtype) * weight).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    if not BY_BLOCK:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    scale = tl.maximum(largest / 448.0, 1e-12)
    quantized = as_float8(wide / scale[:, None])
    tl.store(out_ptr + token * size + columns, quantized, mask=mask)
    if BY_BLOCK:
        group = tl.arange(0, groups)
        tl.store(scales_ptr + group * num_tokens + token, scale, mask=group * GROUP < size)
    else:
        tl.store(scales_ptr + token, tl.max(scale, 0))


def quantize(
    x: torch.Tensor, *, norm: Norm | None = None, gated: bool = False, by_block: bool = False
) -> Quantized:
    """Of norm(x), of x, or of silu(gate) · up where x is [gate | up].

    x: [num_tokens, size or 2 · size], rows contiguous. by_block: a scale per BLOCK elements; else per token.
    """
    num_tokens, size = x.shape[0], x.shape[1] // (2 if gated else 1)
    values = torch.empty(num_tokens, size, dtype=FP8, device=x.device)
    shape = (-(-size // BLOCK), num_tokens) if by_block else (num_tokens,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = max(BLOCK, triton.next_power_of_2(size))
        warps = min(_MAX_WARPS, max(_LEAST_WARPS, block // (32 * _ELEMENTS_PER_THREAD)))
        quantize_kernel[(num_tokens,)](
            x,
            x if norm is None else norm.weight,
            values,
            scales,
            num_tokens,
            size,
            x.stride(0),
            0.0 if norm is None else norm.eps,
            HAS_NORM=norm is not None,
            GATED=gated,
            BY_BLOCK=by_block,
            GROUP=BLOCK,
            BLOCK=block,
            num_warps=warps,
            **pdl_options(x.device),
        )
    return Quantized(values, scales)
