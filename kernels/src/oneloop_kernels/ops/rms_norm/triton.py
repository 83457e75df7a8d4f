"""RMS normalisation on a GPU: one pass, a row or several short ones per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.order import order_is_fixed

_MIN_TILE = 2048
"""Elements per program, at least: short rows (a head) are taken together, where that leaves no multiprocessor idle."""
_SPREAD_WARPS = 4
_SPREAD_BLOCK = 1024
"""A single row of so many elements is spread over so many warps: then latency is what counts."""
_ELEMENTS_PER_THREAD = 16
_RESIDUAL_BLOCK = 1024
_RESIDUAL_ROWS = 8
"""With a residual, rows of up to so many elements are taken by a warp each, so many to a program, where that leaves no
multiprocessor with fewer than three programs: on an H200 all rows of a prompt's step are then under way at once."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    inner,
    size,
    x_outer_stride,
    x_inner_stride,
    x_stride,
    residual_outer_stride,
    residual_inner_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """out[r] = normalised x[r / inner, r % inner] (+ residual, which takes the sum). out is contiguous.

    Grid: [ceil(num_rows / ROWS)]. BLOCK ≥ size.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < size)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()  # so that the next kernel asks for its weights while this one runs
        tl.extra.cuda.gdc_wait()
    outer_index, inner_index = rows // inner, rows % inner
    x_places = x_ptr + outer_index * x_outer_stride + inner_index * x_inner_stride + columns * x_stride
    if HAS_RESIDUAL:  # x is not needed again, and the residual is written anew
        x = tl.load(x_places, mask=mask, other=0.0, eviction_policy="evict_first")
        wide = x.to(tl.float32)
        places = (
            residual_ptr
            + outer_index * residual_outer_stride
            + inner_index * residual_inner_stride
            + columns * residual_stride
        )
        before = tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")
        total = (before.to(tl.float32) + wide).to(x.dtype)
        tl.store(places, total, mask=mask)
        wide = total.to(tl.float32)
    else:
        x = tl.load(x_places, mask=mask, other=0.0)
        wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    quotient = (wide * inverse[:, None]).to(x.dtype)
    tl.store(out_ptr + rows * size + columns, quotient * weight, mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See the contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(x.shape[-1])
        num_rows = out.numel() // x.shape[-1]
        if (
            order_is_fixed()
        ):  # squares are added up across lanes and warps: the same ones for any number of rows
            num_rows = 1
        rows, warps = program_shape(num_rows, block, num_sms(x.device), has_residual=residual is not None)
        launch(x, weight, eps, residual, out, rows=rows, num_warps=warps)
    return out


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    rows: int,
    num_warps: int,
) -> None:
    """The kernel with that many rows and warps per program; out: [..., size] contiguous, not empty."""
    size = x.shape[-1]
    num_rows = out.numel() // size
    x_strides, inner = _row_strides(x)
    residual_strides = (0, 0, 0)
    if residual is not None:
        residual_strides, _ = _row_strides(residual)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_rows,
        inner,
        size,
        *x_strides,
        *residual_strides,
        eps,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(size),
        num_warps=num_warps,
        **pdl_options(x.device),
    )


def program_shape(num_rows: int, block: int, sms: int, *, has_residual: bool) -> tuple[int, int]:
    """(rows, warps). block: of elements of a row; sms: multiprocessors."""
    if has_residual and block <= _RESIDUAL_BLOCK and num_rows >= 3 * sms * _RESIDUAL_ROWS:
        return _RESIDUAL_ROWS, _RESIDUAL_ROWS
    rows = rows_of_a_program(num_rows, block, sms)
    return rows, max(num_warps(rows * block), _SPREAD_WARPS if rows == 1 and block >= _SPREAD_BLOCK else 1)


def rows_of_a_program(num_rows: int, block: int, sms: int) -> int:
    """A power of two. block: of elements of a row; sms: multiprocessors."""
    most = max(1, min(_MIN_TILE // block, num_rows // sms))
    return 1 << (most.bit_length() - 1)


def num_warps(num_elements: int) -> int:
    """Warps for a program of that many elements."""
    return min(16, max(1, num_elements // (32 * _ELEMENTS_PER_THREAD)))


def _row_strides(x: torch.Tensor) -> tuple[tuple[int, int, int], int]:
    """Strides of the outer rows, the inner rows and the elements; rows per outer row.

    RuntimeError (of torch) for four dimensions or more whose outer ones cannot be viewed as one.
    """
    if x.dim() == 1:
        return (0, 0, x.stride(0)), 1
    if x.dim() == 2:
        return (x.stride(0), 0, x.stride(1)), 1
    flat = x if x.dim() == 3 else x.view(-1, *x.shape[-2:])
    return (flat.stride(0), flat.stride(1), flat.stride(2)), flat.shape[1]
