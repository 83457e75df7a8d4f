"""How numbers of a few bits are kept on a GPU (`oneloop_kernels.ops.packed_linear`): their bytes. No torch."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

TILE_ROWS: Final = 64
TILE_COLUMNS: Final = 128
"""Weights are kept in such tiles, the last ones filled up."""
_SMALLEST_GROUP: Final = 16
_ORDER_BYTES: Final = 4


class Form(NamedTuple):
    """What weights must have in common to be computed as one.

    bits: 4, 6 or 8. group_size: columns that share a scale; None: all of a row. shifts: groups have zeros or offsets.
    """

    bits: Literal[4, 6, 8]
    group_size: int | None
    shifts: bool
    ordered: bool = False
    """Columns are kept in another order than x's."""

    def is_packable(self, in_size: int) -> bool:
        """Whether there are kernels for such groups."""
        size = self.group_size
        if size is None or size >= in_size or size % TILE_COLUMNS == 0:
            return True
        return size >= _SMALLEST_GROUP and TILE_COLUMNS % size == 0

    def kept_bytes(self, rows: int, in_size: int, *, halves: int = 1) -> int:
        """Of a weight of so many rows: numbers, then a scale of 16 bits for each row of a group, and its shift.

        halves: 2 where the first half of the rows is a gate: each half has tiles of its own.
        """
        tiles = halves * -(-rows // halves // TILE_ROWS) * -(-in_size // TILE_COLUMNS)
        size = TILE_COLUMNS if self.group_size is None else min(self.group_size, TILE_COLUMNS)
        groups = 1 if self.group_size is not None and self.group_size >= in_size else TILE_COLUMNS // size
        params = 2 * TILE_ROWS * groups * (2 if self.shifts else 1)
        order = _ORDER_BYTES * in_size if self.ordered else 0
        return tiles * (TILE_ROWS * TILE_COLUMNS * self.bits // 8 + params) + order


def halves_of(parts: tuple[int, ...]) -> int:
    """2 for a map of two parts of one size: they are a gate and what it is for."""
    return 2 if len(parts) == 2 and parts[0] == parts[1] else 1
