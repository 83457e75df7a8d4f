"""Experts whose weights are of a few bits: those of one map of all experts side by side, each as a PackedWeight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS, TILE_WORDS, PackedWeight
from oneloop_kernels.ops.packed_linear.packing import dequantize, pack

if TYPE_CHECKING:
    from oneloop_kernels.ops.packed_linear import Bits, Shift
    from oneloop_kernels.ops.packed_linear.packing import Numbers


@dataclass(frozen=True, slots=True)
class PackedStack:
    """As PackedWeight, whose tensors have a dimension of experts before their own. All experts are of one kind."""

    words: torch.Tensor
    """int32 [experts, row tiles, column tiles, 1024]."""
    high: torch.Tensor | None
    params: torch.Tensor
    """int32 [experts, row tiles, column tiles, 32 · groups, kinds]."""
    bits: Bits
    shift: Shift
    rows: int
    """Of one expert's weight, both halves together."""
    columns: int
    halves: int
    """2 for gate and up, of which each begins with a tile."""
    dtype: torch.dtype
    """Of scales and of x."""
    order: torch.Tensor | None = None
    """int32 [experts, columns]: column j is multiplied by x's column order[j]."""

    @classmethod
    def empty(
        cls, num_experts: int, rows: int, columns: int, *,
        halves: int, bits: Bits, shift: Shift, group_size: int, ordered: bool, dtype: torch.dtype, device: torch.device,
    ) -> Self:  # fmt: skip
        """Uninitialised. group_size: columns that share a scale, 16, 32, 64, a multiple of 128, or the columns."""
        tiles = num_experts, halves * -(-rows // halves // TILE_ROWS), -(-columns // TILE_COLUMNS)
        groups = 1 if group_size >= columns else TILE_COLUMNS // min(group_size, TILE_COLUMNS)
        kinds = 1 if shift == "none" else 2
        high = {4: None, 6: torch.int16, 8: torch.int32}[bits]

        def numbers(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.empty(*tiles, *sizes, dtype=dtype, device=device)

        order = torch.empty(num_experts, columns, dtype=torch.int32, device=device) if ordered else None
        return cls(
            numbers(torch.int32, TILE_WORDS),
            None if high is None else numbers(high, TILE_WORDS),
            numbers(torch.int32, 32 * groups, kinds),
            bits,
            shift,
            rows,
            columns,
            halves,
            dtype,
            order,
        )

    def put(self, expert: int, numbers: Numbers, half: int = 0) -> None:
        """A half of an expert's weight, or all of it where it has none. ValueError where it is of another kind than
        the stack; halves must have one order."""
        one = pack(numbers, self.dtype)
        known = (
            self.bits,
            self.shift,
            self.groups,
            self.rows // self.halves,
            self.columns,
            self.order is not None,
        )
        found = (one.bits, one.shift, one.groups, one.rows, one.columns, one.order is not None)
        if found != known:
            raise ValueError(f"expert {expert} is of another kind than the others: {found}, not {known}")
        rows = slice(half * self.row_tiles, (half + 1) * self.row_tiles)
        for stacked, tensor in ((self.words, one.words), (self.high, one.high), (self.params, one.params)):
            if stacked is not None and tensor is not None:
                stacked[expert, rows].copy_(tensor)
        if self.order is not None and one.order is not None:
            self.order[expert].copy_(one.order)

    def expert(self, index: int) -> PackedWeight:
        """Views of one expert's."""
        return PackedWeight(
            self.words[index],
            None if self.high is None else self.high[index],
            self.params[index],
            self.bits,
            self.shift,
            self.rows,
            self.columns,
            self.halves,
            self.dtype,
            None if self.order is None else self.order[index],
        )

    def plain(self, index: int) -> torch.Tensor:
        """One expert's weight, [rows, columns] of the weights' dtype, columns in x's order."""
        weight = dequantize(self.expert(index))
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order[index].long(), weight)

    @property
    def shape(self) -> torch.Size:
        """[num_experts, rows, in_size], as plain numbers would have it."""
        return torch.Size((self.words.shape[0], self.rows, self.columns))

    @property
    def groups(self) -> int:
        """Scales per row of a tile."""
        return self.params.shape[3] // 32

    @property
    def row_tiles(self) -> int:
        """Of one half of one expert."""
        return self.words.shape[1] // self.halves

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        tensors = (self.words, self.high, self.params, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
