"""Linear maps on a GPU: one kernel for few rows, norm, cuBLAS and activation one after the other for many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.linear.plans import StreamPlan, plan_for
from oneloop_kernels.ops.linear.triton.few_rows import few_rows_kernel
from oneloop_kernels.ops.rms_norm.triton import rms_norm
from oneloop_kernels.ops.silu_mul.triton import silu_mul

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import Norm
    from oneloop_kernels.ops.linear.plans import FewRowsPlan, Plan


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the contract."""
    shape = (weight.shape[0], weight.shape[1], gated)
    plan = plan_for(
        x.device,
        x.dtype,
        x.shape[0],
        shape,
        may_split=tickets is not None,
        may_stream=may_stream(x, weight),
    )
    if plan is None:
        return many_rows(x, weight, bias, norm=norm, gated=gated, residual=residual)
    return planned(plan, x, weight, bias, norm=norm, gated=gated, residual=residual, tickets=tickets).run()


_MERGED_PER_THREAD = 128
"""Partial sums that a thread of the streaming kernel fetches at a time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel with its result."""

    kernel: Any
    grid: tuple[int]
    arguments: tuple[object, ...]
    constants: dict[str, object]
    out: torch.Tensor

    def run(self) -> torch.Tensor:
        """Launch it; returns out."""
        self.kernel[self.grid](*self.arguments, **self.constants)
        return self.out

    def compile(self) -> None:
        """Only compile it, in the background where the caller holds Triton's AsyncCompileMode."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants)


def planned(
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> Launch:
    """The contract by the plan's kernel. Where it cannot take the norm inside, that is launched at once."""
    if isinstance(plan, StreamPlan):
        return stream(plan, x, weight, bias, norm=norm, gated=gated, residual=residual, tickets=tickets)
    return few_rows(plan, x, weight, bias, norm=norm, gated=gated, residual=residual, tickets=tickets)


def few_rows(
    plan: FewRowsPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> Launch:
    """The contract by one kernel. With plan.split_k > 1 tickets must be given, one at least per tile (ValueError).

    With tensor cores and float16 the norm is launched at once, a kernel of its own: x · weight, before it is divided by
    the root of the squares, can pass that type's range.
    """
    if norm is not None and plan.use_dot and x.dtype is torch.float16:
        x, norm = rms_norm(x, norm.weight, norm.eps), None
    num_tokens, in_size = x.shape
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    num_tiles, block_m = plan.num_tiles(out_size), plan.block_m(num_tokens)
    out = residual
    if out is None:
        out = torch.empty(num_tokens, out_size, dtype=x.dtype, device=x.device)
    partial = x
    if plan.split_k > 1:
        if tickets is None or tickets.numel() < num_tiles:
            raise ValueError(f"tickets: {num_tiles} are needed to split the sums of {num_tiles} tiles")
        part_size = 2 * plan.block_n * block_m + block_m
        partial = torch.empty(num_tiles * plan.split_k * part_size, dtype=torch.float32, device=x.device)
    arguments = (
        x,
        weight,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        out,
        out,
        partial,
        x if tickets is None else tickets,
        num_tokens,
        in_size,
        out_size,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        0.0 if norm is None else norm.eps,
    )
    constants: dict[str, object] = {
        "HAS_BIAS": bias is not None,
        "HAS_NORM": norm is not None,
        "GATED": gated,
        "HAS_RESIDUAL": residual is not None,
        "USE_DOT": plan.use_dot,
        "BLOCK_M": block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "SPLIT_K": plan.split_k,
        "PREFETCH": plan.prefetch_bytes(weight),
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        **pdl_options(x.device),
    }
    return Launch(few_rows_kernel, (num_tiles * plan.split_k,), arguments, constants, out)


def stream(
    plan: StreamPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
) -> Launch:
    """The contract by one kernel of Hopper, after one for the norm, which is launched at once: its rows are made while
    the first weights are under way. x and weight: as `may_stream` says. tickets: one at least per tile where programs
    share one (ValueError).
    """
    from oneloop_kernels.ops.linear.triton.stream import stream_kernel

    num_tokens, in_size = x.shape
    out_size = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m, num_tiles = plan.block_m(num_tokens), plan.num_tiles(num_tokens, out_size)
    out = residual
    if out is None:
        out = torch.empty(num_tokens, out_size, dtype=x.dtype, device=x.device)
    num_blocks = -(-in_size // plan.block_k)
    programs = plan.grid(x.device, num_tiles, num_blocks)
    cut = num_tiles % programs != 0
    if cut and (tickets is None or tickets.numel() < num_tiles):
        raise ValueError(f"tickets: {num_tiles} are needed to split the sums of {num_tiles} tiles")
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    part_size = plan.block_n * block_m * (2 if gated else 1)
    arguments = (
        _tensor_map(x, block_m, plan.block_k),
        _tensor_map(weight, plan.block_n, plan.block_k),
        x if bias is None else bias,
        out,
        torch.empty(2 * programs * part_size if cut else 1, dtype=torch.float32, device=x.device),
        torch.empty(1, dtype=torch.int32, device=x.device) if tickets is None else tickets,
        num_tokens,
        in_size,
        out_size,
        out.stride(0),
    )
    constants: dict[str, object] = {
        "HAS_BIAS": bias is not None,
        "GATED": gated,
        "HAS_RESIDUAL": residual is not None,
        "BLOCK_M": block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.num_stages,
        "MERGE": max(1, min(8, _MERGED_PER_THREAD * plan.num_warps * 32 // part_size)),
        "num_warps": plan.num_warps,
        **pdl_options(x.device),
    }
    return Launch(stream_kernel, (programs,), arguments, constants, out)


def may_stream(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copy engine can read both: short types, rows at multiples of 16 bytes."""
    # The columns too: a norm leaves dense rows of so many.
    return (
        x.itemsize == 2
        and weight.shape[1] % 8 == 0
        and all(
            one.stride(1) == 1 and one.stride(0) % 8 == 0 and one.data_ptr() % 16 == 0 for one in (x, weight)
        )
    )


def _tensor_map(matrix: torch.Tensor, block_rows: int, block_columns: int) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = box_layout(matrix.dtype, block_rows, block_columns)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_columns], layout
    )


@cache
def box_layout(dtype: torch.dtype, block_rows: int, block_columns: int) -> Any:
    """How a box of a matrix of that type lies in shared memory, as `triton.stream` expects it."""
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([block_rows, block_columns], kind)


def many_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The contract by cuBLAS, which adds the residual where there is no bias beside it."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    if residual is not None and bias is None and not gated:
        return residual.addmm_(x, weight.t())
    out = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if gated:
        out = silu_mul(out)
    return out if residual is None else residual.add_(out)
