"""Launches of the kernels of linear maps, by their plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.linear.plans import DENSE_BLOCK_K, DensePlan, StreamPlan
from oneloop_kernels.ops.linear.triton.few_rows import few_rows_kernel
from oneloop_kernels.ops.rms_norm.triton import rms_norm

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.linear.plans import FewRowsPlan, Plan

_MERGED_PER_THREAD = 128
"""Partial sums that a thread of the streaming kernel fetches at a time."""
_WARPS_OF_TWO = 4
_SHARED_REGISTERS = 128
"""With so many warps that multiply, and as many that do not, two programs of so many registers per thread share a
multiprocessor. Those that multiply get what the others give back."""
ROWS_OF_A_WARP = 16
"""Of the dense kernel: four warps together have the rows of a matrix product."""


class Scales(NamedTuple):
    """What the numbers of an e4m3 x and weight mean, float32 factors.

    weight: [rows of the weight], and x: [num_tokens]; or, per block, weight: [rows / n, number of blocks of inputs],
    and x: [number of blocks, num_tokens]. dtype: of the result.
    """

    x: torch.Tensor
    weight: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a kernel with its result."""

    kernel: Any
    grid: tuple[int, ...]
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


def planned(plan: Plan, call: LinearCall) -> Launch:
    """The call by the plan's kernel. Where it cannot take the norm inside, that is launched at once."""
    if isinstance(plan, StreamPlan):
        return stream(plan, call)
    if isinstance(plan, DensePlan):
        return dense(plan, call)
    return few_rows(plan, call)


def few_rows(plan: FewRowsPlan, call: LinearCall, *, block_m: int | None = None) -> Launch:
    """The call by one kernel. With plan.split_k > 1 tickets must be given, one at least per tile (ValueError).

    block_m: rows of x of a tile, of which there may be several; without it one tile has them all.

    With tensor cores and float16 the norm is launched at once, a kernel of its own: x · weight, before it is divided by
    the root of the squares, can pass that type's range.
    """
    if plan.use_dot and call.x.dtype is torch.float16:
        call = normed(call)
    x, weight, norm = call.x, call.weight, call.norm
    num_tokens, in_size = x.shape
    out_size, out = call.out_size, _result(call)
    num_tiles, block_m = plan.num_tiles(out_size), block_m or plan.block_m(num_tokens)
    token_tiles = -(-num_tokens // block_m)
    partial = x
    if plan.split_k > 1:
        _check_tickets(call, num_tiles)
        part_size = 2 * plan.block_n * block_m + block_m
        partial = torch.empty(num_tiles * plan.split_k * part_size, dtype=torch.float32, device=x.device)
    arguments = (
        x,
        weight,
        x if call.bias is None else call.bias,
        x if norm is None else norm.weight,
        out,
        out,
        partial,
        x if call.tickets is None else call.tickets,
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
        **_surroundings(call),
        "HAS_NORM": norm is not None,
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
    return Launch(few_rows_kernel, (num_tiles * plan.split_k, token_tiles), arguments, constants, out)


def stream(plan: StreamPlan, call: LinearCall, scales: Scales | None = None) -> Launch:
    """The call by one kernel of Hopper, after one for the norm, which is launched at once: its rows are made while the
    first weights are under way. x and weight: as `may_stream` says, or e4m3 with scales; where those are per block,
    plan.block_k is one. tickets: one at least per tile where programs share one (ValueError).
    """
    from oneloop_kernels.ops.linear.triton.stream import stream_kernel

    call = normed(call)
    num_tokens, in_size = call.x.shape
    block_m, num_tiles = plan.block_m(num_tokens), plan.num_tiles(num_tokens, call.out_size)
    programs = plan.grid(call.x.device, num_tiles, -(-in_size // plan.block_k))
    cut = not plan.whole and num_tiles % programs != 0
    if cut:
        _check_tickets(call, num_tiles)
    part_size = plan.block_n * block_m * (2 if call.gated else 1)
    out = _result(call, scales)
    constants: dict[str, object] = {
        **_scaling(call, scales),
        **_surroundings(call),
        "BLOCK_M": block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.num_stages,
        "MERGE": max(1, min(8, _MERGED_PER_THREAD * plan.num_warps * 32 // part_size)),
        "WHOLE": plan.whole,
        "num_warps": plan.num_warps,
        **({"maxnreg": _SHARED_REGISTERS} if plan.num_warps == _WARPS_OF_TWO else {}),
        **pdl_options(call.x.device),
    }
    x, device = call.x, call.x.device
    arguments = (
        tensor_map(x, block_m, plan.block_k),
        tensor_map(call.weight, plan.block_n, plan.block_k),
        x if scales is None else scales.x,
        x if scales is None else scales.weight,
        x if call.bias is None else call.bias,
        out,
        torch.empty(2 * programs * part_size if cut else 1, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int32, device=device) if call.tickets is None else call.tickets,
        num_tokens,
        in_size,
        call.out_size,
        out.stride(0),
    )
    return Launch(stream_kernel, (programs,), arguments, constants, out)


def dense(plan: DensePlan, call: LinearCall, scales: Scales | None = None) -> Launch:
    """The call by one kernel of Hopper, after one for the norm, which is launched at once.

    x and weight: as `may_stream` says, or e4m3 with scales per row.
    """
    from oneloop_kernels.ops.linear.triton.dense import dense_kernel

    call = normed(call)
    x, out, widths = call.x, _result(call, scales), plan.three_widths
    block_k = 2 * DENSE_BLOCK_K // x.itemsize
    maps = {width: tensor_map(call.weight, width, block_k) for width in plan.widths}
    grid = plan.grid(x.device, x.shape[0], call.out_size)
    partial = x  # not looked at
    if plan.pieces > 1:
        part_size = plan.block_m * sum(widths) * (2 if call.gated else 1)
        partial = torch.empty(grid * part_size, dtype=torch.float32, device=x.device)
    arguments = (
        tensor_map(x, plan.block_m, block_k),
        *(maps[width or widths[0]] for width in widths),
        x if scales is None else scales.x,
        x if scales is None else scales.weight,
        x if call.bias is None else call.bias,
        out,
        partial,
        x.shape[0],
        x.shape[1],
        call.out_size,
        out.stride(0),
    )
    constants: dict[str, object] = {
        "SCALES": _scaling(call, scales)["SCALES"],
        **_surroundings(call),
        **dict(zip(("FIRST", "SECOND", "THIRD"), widths, strict=True)),
        "BLOCK_M": plan.block_m,
        "BLOCK_K": block_k,
        "PIECES": plan.pieces,
        "STAGES": plan.num_stages,
        "num_warps": plan.block_m // ROWS_OF_A_WARP,
        **pdl_options(x.device),
    }
    return Launch(dense_kernel, (grid,), arguments, constants, out)


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


def normed(call: LinearCall) -> LinearCall:
    """The norm launched at once, where there is one."""
    if call.norm is None:
        return call
    return call._replace(x=rms_norm(call.x, call.norm.weight, call.norm.eps), norm=None)


def _result(call: LinearCall, scales: Scales | None = None) -> torch.Tensor:
    if call.residual is not None:
        return call.residual
    dtype = call.x.dtype if scales is None else scales.dtype
    return torch.empty(call.x.shape[0], call.out_size, dtype=dtype, device=call.x.device)


def _scaling(call: LinearCall, scales: Scales | None) -> dict[str, int]:
    """Of the kernels of Hopper: by row 1, by block 2, not at all 0; and how many rows of the weight share one."""
    if scales is None:
        return {"SCALES": 0, "SCALE_ROWS": 1}
    return {"SCALES": scales.weight.dim(), "SCALE_ROWS": call.weight.shape[0] // scales.weight.shape[0]}


def _surroundings(call: LinearCall) -> dict[str, object]:
    return {
        "HAS_BIAS": call.bias is not None,
        "GATED": call.gated,
        "HAS_RESIDUAL": call.residual is not None,
    }


def _check_tickets(call: LinearCall, least: int) -> None:
    if call.tickets is None or call.tickets.numel() < least:
        raise ValueError(f"tickets: {least} are needed to split sums among programs")


def tensor_map(matrix: torch.Tensor, block_rows: int, block_columns: int) -> object:
    """For copies of boxes of a matrix."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = box_layout(matrix.dtype, block_rows, block_columns)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [block_rows, block_columns], layout
    )


@cache
def box_layout(dtype: torch.dtype, *box: int) -> Any:
    """How a box (of a matrix: rows, columns) of that type lies in shared memory, as the kernels of Hopper expect it."""
    from triton.experimental.gluon import language as gl

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    kind = kinds[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)
