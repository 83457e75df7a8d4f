"""Launches of the kernels of packed linear maps."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from oneloop_kernels.launch import pdl_options
from oneloop_kernels.ops.linear.launches import Launch, box_layout, tensor_map
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS
from oneloop_kernels.ops.packed_linear.plans import SLICE_ROWS
from oneloop_kernels.ops.rms_norm.triton import rms_norm

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear.heads import Surroundings
    from oneloop_kernels.ops.packed_linear import PackedCall, PackedWeight
    from oneloop_kernels.ops.packed_linear.plans import StreamPlan

_MERGED_PER_THREAD = 128
"""Partial sums that a thread fetches at a time."""
_UNPACK_WARPS = 4
_LONGEST_LINE = 256
"""Elements that a copy's box has in a row; longer rows come in several boxes, which lie one after the other."""
_STREAM_WARPS = 4
"""That multiply: a tensor core instruction of 64 rows."""


def prepared(call: PackedCall) -> PackedCall:
    """The norm and the order of x's columns launched at once, where there are.

    ValueError where the weight's rows are not in the halves that the call takes them for.
    """
    if (call.weight.halves == 2) != call.gated and call.weight.rows // 2 % TILE_ROWS:
        raise ValueError(f"halves: a weight of {call.weight.halves} for a call with gated {call.gated}")
    x = call.x if call.norm is None else rms_norm(call.x, call.norm.weight, call.norm.eps)
    if call.weight.order is not None:
        x = x.index_select(1, call.weight.order)
    return call._replace(x=x, norm=None)


def may_stream(call: PackedCall) -> bool:
    """Whether the copy engine can read x: rows at multiples of 16 bytes."""
    return call.x.stride(0) % 8 == 0 and call.x.data_ptr() % 16 == 0


def stream(plan: StreamPlan, call: PackedCall) -> Launch:
    """A `prepared` call by a kernel of Hopper. x: see `may_stream`. tickets: one at least per tile that is cut."""
    if plan.cuts_slices(call.weight, call.x.shape[0]):
        return slices(plan, call)
    from oneloop_kernels.ops.packed_linear.triton.stream import stream_kernel

    x, weight = call.x, call.weight
    num_tokens, device = x.shape[0], x.device
    block_m, num_tiles = plan.block_m(num_tokens), plan.num_tiles(num_tokens, call.out_size)
    programs = plan.grid(device, num_tiles, weight.columns)
    cut = num_tiles % programs != 0
    if call.tickets is None or call.tickets.numel() < num_tiles:
        raise ValueError(f"tickets: {num_tiles} are needed to split sums among programs")
    part_size = TILE_ROWS * block_m * (2 if call.gated else 1)
    out = _result(call)
    rows = tensor_map(x, block_m, TILE_COLUMNS)
    words = _map_of_tiles(weight.words, 4, 4 * plan.column_tiles)
    lines = max(1, weight.params.shape[2] * weight.params.shape[3] // _LONGEST_LINE)
    arguments = (
        rows,
        words,
        words if weight.high is None else _map_of_tiles(weight.high, 4, 4 * plan.column_tiles),
        _map_of_tiles(weight.params, lines, lines * plan.column_tiles),
        x if call.bias is None else call.bias,
        out,
        torch.empty(2 * programs * part_size if cut else 1, dtype=torch.float32, device=device),
        call.tickets,
        num_tokens,
        weight.columns,
        call.out_size,
        weight.words.shape[0] // 2,
        out.stride(0),
    )
    constants: dict[str, object] = {
        **_constants(plan, call),
        "COLUMN_TILES": plan.column_tiles,
        "MERGE": max(1, min(8, _MERGED_PER_THREAD * _STREAM_WARPS * 32 // part_size)),
    }
    return Launch(stream_kernel, (programs,), arguments, constants, out)


def slices(plan: StreamPlan, call: PackedCall, around: Surroundings | None = None) -> Launch:
    """As stream, by a plan that cuts slices. around: of a map to queries, keys and values, to be rotated and stored."""
    from oneloop_kernels.ops.packed_linear.triton.slices import slices_kernel

    x, weight, out = call.x, call.weight, _result(call)
    num_tokens, columns = x.shape
    out_size = call.out_size if around is None else call.out_size // 2
    programs = plan.grid(x.device, plan.num_tiles(num_tokens, out_size), columns)
    in_tiles = x.as_strided(
        (columns // TILE_COLUMNS, num_tokens, TILE_COLUMNS), (TILE_COLUMNS, x.stride(0), 1)
    )
    rows = _map(in_tiles, [4, plan.block_m(num_tokens), TILE_COLUMNS], None)
    words = _map_of_slices(weight.words, 2)
    arguments = (
        rows,
        words,
        words if weight.high is None else _map_of_slices(weight.high, 2),
        _map_of_slices(weight.params, min(weight.groups, 2)),
        x if call.bias is None else call.bias,
        out,
        *((x, x, x) if around is None else (around.rotary.cos, around.cache, around.slots)),
        num_tokens,
        columns,
        out_size,
        weight.words.shape[0] // 2,
        out.stride(0),
        *((0, 0, 0, 0) if around is None else (len(around.slots), *around.cache.stride()[:3])),
    )
    heads = (0, 1, SLICE_ROWS, 1)
    if around is not None:
        half_dim, num_kv_heads = around.cache.shape[3] // 2, around.num_kv_heads
        num_heads = call.out_size // (2 * half_dim) - 2 * num_kv_heads
        heads = (num_heads, num_kv_heads, half_dim, around.cache.shape[1])
    constants: dict[str, object] = {
        **_constants(plan, call),
        **dict(zip(("HEADS", "KV_HEADS", "HALF_DIM", "BLOCK_SIZE"), heads, strict=True)),
    }
    return Launch(slices_kernel, (programs,), arguments, constants, out)


def few_rows(call: PackedCall) -> Launch:
    """A `prepared` call by the kernel of any card."""
    from oneloop_kernels.ops.packed_linear.triton.few_rows import few_rows_kernel

    x, weight, out = call.x, call.weight, _result(call)
    num_tokens = x.shape[0]
    block_m = min(32, max(16, 1 << (num_tokens - 1).bit_length()))
    row_tiles = weight.words.shape[0] // 2 if call.gated else weight.words.shape[0]
    arguments = (
        x,
        weight.words,
        weight.words if weight.high is None else weight.high,
        weight.params.view(weight.dtype),
        x if call.bias is None else call.bias,
        out,
        num_tokens,
        weight.columns,
        call.out_size,
        weight.words.shape[1],
        row_tiles,
        x.stride(0),
        out.stride(0),
    )
    constants: dict[str, object] = {
        **_surroundings(call),
        **_kind(weight),
        "BLOCK_M": block_m,
        "num_warps": 4,
        **pdl_options(x.device),
    }
    return Launch(few_rows_kernel, (row_tiles, -(-num_tokens // block_m)), arguments, constants, out)


def unpacked(weight: PackedWeight) -> Launch:
    """The weight written out, [rows, columns], columns in the stored order."""
    from oneloop_kernels.ops.packed_linear.triton.unpack import unpack_kernel

    out = torch.empty(weight.rows, weight.columns, dtype=weight.dtype, device=weight.words.device)
    arguments = (
        weight.words,
        weight.words if weight.high is None else weight.high,
        weight.params.view(weight.dtype),
        out,
        weight.words.shape[0] // weight.halves,
        weight.rows // weight.halves,
        weight.columns,
    )
    constants: dict[str, object] = {
        **_kind(weight),
        "num_warps": _UNPACK_WARPS,
        **pdl_options(out.device),
    }
    return Launch(unpack_kernel, tuple(weight.words.shape[:2]), arguments, constants, out)


def _result(call: PackedCall) -> torch.Tensor:
    if call.residual is not None:
        return call.residual
    if call.out is not None:
        return call.out
    return torch.empty(call.x.shape[0], call.out_size, dtype=call.x.dtype, device=call.x.device)


def _constants(plan: StreamPlan, call: PackedCall) -> dict[str, object]:
    """That both kernels of Hopper have."""
    num_tokens = call.x.shape[0]
    return {
        **_surroundings(call),
        **_kind(call.weight),
        "ON_SUMS": plan.on_sums(call.weight, num_tokens),
        "BLOCK_M": plan.block_m(num_tokens),
        "STAGES": plan.num_stages,
        "num_warps": _STREAM_WARPS,
        **({} if plan.max_registers is None else {"maxnreg": plan.max_registers}),
        **pdl_options(call.x.device),
    }


def _surroundings(call: PackedCall) -> dict[str, object]:
    return {
        "HAS_BIAS": call.bias is not None,
        "GATED": call.gated,
        "HAS_RESIDUAL": call.residual is not None,
    }


def _kind(weight: PackedWeight) -> dict[str, object]:
    return {"BITS": weight.bits, "SHIFT": weight.shift, "GROUPS": weight.groups}


def _map_of_tiles(tiles: torch.Tensor, lines: int, block_lines: int) -> object:
    """For copies of so many lines of a tile of rows of [row tiles, column tiles, …]; a tile is seen as `lines`."""
    seen = tiles.view(tiles.shape[0], tiles.shape[1] * lines, -1)
    return _map(seen, [1, block_lines, seen.shape[2]], 8 * seen.element_size())


def _map_of_slices(tiles: torch.Tensor, lines: int) -> object:
    """For copies of a warp's rows of four column tiles of [row tiles, column tiles, lines, warps, …]."""
    seen = tiles.view(tiles.shape[0], tiles.shape[1] * lines, 4, -1)
    return _map(seen, [1, 4 * lines, 1, seen.shape[3]], 8 * seen.element_size())


def _map(seen: torch.Tensor, box: list[int], plain_bits: int | None) -> object:
    """A tensor map whose boxes lie in shared memory as in memory, numbers of so many bits; None: as rows of x do."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = box_layout(seen.dtype, *box) if plain_bits is None else _plain(plain_bits, len(box))
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), box, layout)


@cache
def _plain(bits: int, rank: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=rank)
