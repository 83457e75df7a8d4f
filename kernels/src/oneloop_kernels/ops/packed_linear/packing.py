"""The layout of PackedWeight: each thread of the tensor cores finds its numbers side by side.

A tile is 64 rows × 128 columns. For a product of 64 rows × 16 columns a thread holds eight weights: with warp w (0–3)
and lane 4 g + c they are rows 16 w + g (+ 8) and columns 2 c, 2 c + 1 (+ 8). They are one word; a tile has eight such
products k = 4 a + 2 b + d. Word [a][w][g][c][b][d] has in bits 4 n … 4 n + 3, n = 4 h + 2 s + r, the number of row
16 w + 8 r + g and column 16 k + 8 s + 2 c + h: so a word and a mask give two neighbouring columns, 16 bits apart.

The upper two bits of six: int16 [a][w][g][c][b][h] has in bits 2 n, n = 4 d + 2 s + r, those of the same number.
Scales: [a][w][g][b][d][r] of 16 bits, where dimensions of the columns that share a scale are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop_kernels.ops.packed_linear import Bits, Shift

GROUP_SIZES: Final = (16, 32, 64, 128)
"""Columns that may share a scale; multiples of 128 too."""

_ROWS = (4, 2, 8)  # w, r, g
_COLUMNS = (2, 2, 2, 2, 4, 2)  # a, b, d, s, c, h
_WORDS = (0, 4, 5, 1, 3, 9, 6, 7, 10, 8, 2)  # tiles, then a, w, g, c, b, d and the digits of n: h, s, r
_PAIRS = (0, 4, 5, 1, 3, 9, 6, 10, 7, 8, 2)  # …, a, w, g, c, b, h and d, s, r


class Numbers(NamedTuple):
    """A weight as a file has it, in the order of rows and columns. w = (value − zero) · scale, or as PackedWeight says.

    values: uint8 [rows, columns]. scales: [rows, groups], float; shifts: the same shape, zeros (whole) or offsets.
    group_size: columns of a group; the last may be shorter. order: as PackedWeight.order.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bits: Bits
    group_size: int
    shift: Shift = "none"
    shifts: torch.Tensor | None = None
    order: torch.Tensor | None = None


def fits(group_size: int) -> bool:
    """Whether groups of so many columns can be packed."""
    return group_size in GROUP_SIZES or (group_size > 0 and group_size % TILE_COLUMNS == 0)


def pack(numbers: Numbers, dtype: torch.dtype, *, halves: int = 1) -> PackedWeight:
    """halves: 2 for a gated map. Scales and offsets are rounded to dtype. ValueError for other sizes of groups."""
    rows, columns = numbers.values.shape
    whole = numbers.group_size >= columns
    if not whole and not fits(numbers.group_size):
        raise ValueError(f"group_size {numbers.group_size}: 16, 32, 64 or a multiple of 128 can be packed")
    values = _tiles(numbers.values, halves)
    lower = _bits(values & 15 if numbers.bits > 4 else values, 4, _WORDS)
    high = None
    if numbers.bits == 8:
        high = _bits(values >> 4, 4, _WORDS)
    elif numbers.bits == 6:
        high = _bits(values >> 4, 2, _PAIRS).to(torch.int16)
    kinds = [_params(numbers, numbers.scales.to(dtype), halves)]
    if numbers.shifts is not None:
        kinds.append(_params(numbers, _stored_shifts(numbers, dtype), halves))
    return PackedWeight(
        lower,
        high,
        torch.stack(kinds, -1),
        numbers.bits,
        numbers.shift,
        rows,
        columns,
        halves,
        dtype,
        numbers.order,
    )


def joined(parts: Sequence[Numbers]) -> Numbers:
    """The rows of all parts one below the other. They must agree in all but their rows: see `agree`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    shifts = [part.shifts for part in parts if part.shifts is not None]
    return first._replace(
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        shifts=torch.cat(shifts) if shifts else None,
    )


def agree(one: Numbers, other: Numbers) -> bool:
    """Whether both can be rows of one weight."""
    if (one.bits, one.group_size, one.shift) != (other.bits, other.group_size, other.shift):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def plain(numbers: Numbers) -> torch.Tensor:
    """float32 [rows, columns], columns in x's order."""
    columns = numbers.values.shape[1]
    values = numbers.values.float()

    def spread(per_group: torch.Tensor) -> torch.Tensor:
        return per_group.float().repeat_interleave(numbers.group_size, 1)[:, :columns]

    if numbers.shift == "zero":
        assert numbers.shifts is not None
        values -= spread(numbers.shifts)
    else:
        values -= 1 << (numbers.bits - 1)
    values *= spread(numbers.scales)
    if numbers.shift == "offset":
        assert numbers.shifts is not None
        values += spread(numbers.shifts)
    if numbers.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, numbers.order.long(), values)


def unpack(weight: PackedWeight) -> Numbers:
    """The inverse of `pack`; groups have the columns that scales are stored for."""
    values = _unbits(weight.words, 4, _WORDS)
    if weight.bits == 8:
        assert weight.high is not None
        values |= _unbits(weight.high, 4, _WORDS) << 4
    elif weight.bits == 6:
        assert weight.high is not None
        values |= _unbits(weight.high, 2, _PAIRS) << 4
    shifts = None
    if weight.shift != "none":
        shifts = _unparams(weight, 1).float()
        if weight.shift == "zero":
            shifts -= stored_base(weight.bits, weight.dtype)
    return Numbers(
        _untile(values, weight)[:, : weight.columns],
        _unparams(weight, 0),
        weight.bits,
        TILE_COLUMNS // weight.groups,
        weight.shift,
        shifts,
        weight.order,
    )


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """[rows, columns] of the weight's dtype, each rounded once; columns as they are stored (`order` not undone)."""
    return plain(unpack(weight)._replace(order=None)).to(weight.dtype)


def stored_base(bits: int, dtype: torch.dtype) -> float:
    """What is added to a zero where it is stored, so that kernels subtract it from a number as they unpack that:

    its bits below those of a power of two. Of eight bits, which bfloat16 has no room for beside it, −128 is added.
    """
    return -128.0 if bits == 8 else magic(dtype)


def magic(dtype: torch.dtype) -> float:
    """The power of two whose last bit has the weight 1."""
    return 128.0 if dtype is torch.bfloat16 else 1024.0


def _stored_shifts(numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
    assert numbers.shifts is not None
    if numbers.shift == "zero":
        return (numbers.shifts.float() + stored_base(numbers.bits, dtype)).to(dtype)
    return numbers.shifts.to(dtype)


def _padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


def _by_halves(matrix: torch.Tensor, halves: int, columns: int) -> torch.Tensor:
    """Each half padded to whole tiles of rows, all to so many columns."""
    parts = matrix.chunk(halves)
    rows = -(-parts[0].shape[0] // TILE_ROWS) * TILE_ROWS
    return torch.cat([_padded(part, rows, columns) for part in parts])


def _tiles(values: torch.Tensor, halves: int) -> torch.Tensor:
    """[row tiles, w, r, g, column tiles, a, b, d, s, c, h]."""
    columns = -(-values.shape[1] // TILE_COLUMNS) * TILE_COLUMNS
    padded = _by_halves(values, halves, columns)
    return padded.view(padded.shape[0] // TILE_ROWS, *_ROWS, columns // TILE_COLUMNS, *_COLUMNS)


def _bits(tiles: torch.Tensor, width: int, order: tuple[int, ...]) -> torch.Tensor:
    """Eight numbers of `width` bits in one int32 → [row tiles, column tiles, 1024]."""
    eights = tiles.permute(order).reshape(tiles.shape[0], tiles.shape[4], -1, 8)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=tiles.device)
    for place in range(8):
        words |= eights[..., place].to(torch.int32) << (width * place)
    return words


def _unbits(words: torch.Tensor, width: int, order: tuple[int, ...]) -> torch.Tensor:
    """uint8 [row tiles, w, r, g, column tiles, a, b, d, s, c, h]."""
    sizes = (words.shape[0], *_ROWS, words.shape[1], *_COLUMNS)
    wide = words.to(torch.int32)
    eights = torch.stack([(wide >> (width * place)) & ((1 << width) - 1) for place in range(8)], -1)
    tiles = eights.to(torch.uint8).view(*(sizes[axis] for axis in order))
    inverse = [order.index(axis) for axis in range(len(order))]
    return tiles.permute(inverse)


def _untile(tiles: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """[rows, all columns]."""
    matrix = tiles.reshape(tiles.shape[:4].numel(), -1)
    each = matrix.shape[0] // weight.halves
    return torch.cat([part[: weight.rows // weight.halves] for part in _split_rows(matrix, each)])


def _params(numbers: Numbers, per_group: torch.Tensor, halves: int) -> torch.Tensor:
    """int32 [row tiles, column tiles, 32 · groups]."""
    columns = numbers.values.shape[1]
    size = min(numbers.group_size, TILE_COLUMNS) if numbers.group_size < columns else TILE_COLUMNS
    num_stored = -(-columns // size)
    chosen = torch.arange(num_stored, device=per_group.device) * size // numbers.group_size
    tiles = -(-columns // TILE_COLUMNS)
    padded = _by_halves(per_group[:, chosen], halves, tiles * (TILE_COLUMNS // size))
    split = _split(TILE_COLUMNS // size)
    view = padded.view(padded.shape[0] // TILE_ROWS, *_ROWS, tiles, *split)
    pairs = view.permute(0, 4, 5, 1, 3, 6, 7, 2).contiguous().view(torch.int32)
    return pairs.reshape(pairs.shape[0], tiles, -1)


def _unparams(weight: PackedWeight, kind: int) -> torch.Tensor:
    """[rows, stored groups] of the weight's dtype."""
    pairs = weight.params[..., kind].contiguous().view(weight.dtype)
    row_tiles, tiles = pairs.shape[:2]
    a, b, d = _split(weight.groups)
    view = pairs.view(row_tiles, tiles, a, _ROWS[0], _ROWS[2], b, d, _ROWS[1])
    matrix = view.permute(0, 3, 7, 4, 1, 2, 5, 6).reshape(row_tiles * TILE_ROWS, -1)
    each = matrix.shape[0] // weight.halves
    return torch.cat([part[: weight.rows // weight.halves] for part in _split_rows(matrix, each)])


def _split_rows(matrix: torch.Tensor, each: int) -> tuple[torch.Tensor, ...]:
    return torch.split(matrix, each)


def _split(groups: int) -> tuple[int, int, int]:
    """How many of a, b, d so many groups of a tile tell apart."""
    return min(groups, 2), min(max(groups // 2, 1), 2), max(groups // 4, 1)
