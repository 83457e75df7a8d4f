"""silu(gate) · up on a GPU, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import pdl_options

_BLOCK = 2048
_NUM_WARPS = 8


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    size,
    row_stride,
    stride,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[row, c] = silu(gate_up[row, c]) · gate_up[row, size + c]; out is contiguous.

    Grid: [num_tokens, ceil(size / BLOCK)].
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate_ptr = gate_up_ptr + row * row_stride
    up_ptr = gate_ptr + tl.cast(size, tl.int64) * stride
    gate = tl.load(gate_ptr + columns.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + columns.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, silu_mul_tile(gate, up), mask=mask)


@triton.jit
def silu_mul_tile(gate, up):
    """gate / (1 + exp(−gate)) · up of float32 tensors."""
    return gate / (1.0 + tl.exp(-gate)) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See the contract."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        launch(gate_up, out, block=_BLOCK, num_warps=_NUM_WARPS)
    return out


def launch(gate_up: torch.Tensor, out: torch.Tensor, *, block: int, num_warps: int) -> None:
    """The kernel with that many columns and warps per program; out: [num_tokens, size] contiguous, not empty."""
    num_tokens, size = out.shape
    silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up,
        out,
        size,
        gate_up.stride(0),
        gate_up.stride(1),
        BLOCK=block,
        num_warps=num_warps,
        **pdl_options(gate_up.device),
    )
