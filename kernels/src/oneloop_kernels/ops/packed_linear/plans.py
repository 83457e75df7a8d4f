"""How the kernels of packed linear maps are cut: measured per card and shape, with a rule for the rest.

`python -m oneloop_bench.kernels.packed_linear --sweep` prints lines of TUNED.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.launch import card_name, num_sms, of_card
from oneloop_kernels.ops.linear import NUM_TICKETS
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.packed_linear import PackedWeight

MAX_STREAMING_ROWS: Final = 64
"""By the rule, on Hopper: up to here weights are unpacked in the product, beyond written out for cuBLAS."""
_MAX_SUMMED_ROWS: Final = 16
"""Of x in a tile. With more there is more to scale than the weights."""
_MAX_SLICE_ROWS: Final = 8
"""By the rule: up to here maps that are not gated are cut into slices."""
MAX_FEW_ROWS: Final = 32
"""By the rule, on other cards, likewise."""

_SHARED_BYTES: Final = {1: 208 << 10, 2: 104 << 10, 3: 68 << 10, 4: 50 << 10}
"""Of a multiprocessor, for each of so many programs that share it."""
_MAX_STAGES: Final = 16


SLICE_ROWS: Final = 16
"""Of a tile of `triton.slices`."""
SLICE_COLUMNS: Final = 4 * TILE_COLUMNS
"""Of a copy there."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Constants of `triton.stream.stream_kernel`, or of `triton.slices.slices_kernel`, for Hopper.

    column_tiles: in a copy, 1 or 2. num_stages: copies under way. residents: programs that share a multiprocessor, 1 to
    4. programs: in the grid, at most (0: by a rule). most_rows: of x in a tile. slices: by the second
    kernel, where it can: of few rows; it takes no column_tiles.
    """

    column_tiles: int
    num_stages: int
    residents: int = 1
    programs: int = 0
    most_rows: int = 64
    slices: bool = False

    @property
    def max_registers(self) -> int | None:
        """Per thread, so that the residents find room; those that multiply get what the one that copies gives back."""
        return {2: 128, 3: 80, 4: 64}.get(self.residents)

    def block_m(self, num_tokens: int) -> int:
        """Rows of x of a tile."""
        return min(self.most_rows, max(8, 1 << (num_tokens - 1).bit_length()))

    def num_tiles(self, num_tokens: int, out_size: int) -> int:
        """out_size: of the result."""
        rows = SLICE_ROWS if self.slices else TILE_ROWS
        return -(-out_size // rows) * -(-num_tokens // self.block_m(num_tokens))

    def cuts_slices(self, weight: PackedWeight, num_tokens: int) -> bool:
        """Whether the second kernel can: x in one tile of few rows, and whole tiles of columns."""
        few = num_tokens <= self.block_m(num_tokens) <= _MAX_SUMMED_ROWS
        return self.slices and few and weight.columns % TILE_COLUMNS == 0

    def on_sums(self, weight: PackedWeight, num_tokens: int) -> bool:
        """Whether the kernel scales sums, exactly, instead of weights, which rounds them: of 4 bits and few rows, in
        groups of 128 columns or more."""
        few = self.block_m(num_tokens) <= _MAX_SUMMED_ROWS
        return few and weight.bits == 4 and weight.groups == 1

    def grid(self, device: torch.device, num_tiles: int, columns: int) -> int:
        """Programs for so many tiles of so many columns.

        The rule: as many to a tile, or tiles to a program, as find room. To put tiles together from pieces of several
        programs takes longer than a few idle multiprocessors cost.
        """
        room = self.residents * num_sms(device)
        if self.slices:
            return min(self.programs or room, num_tiles)
        units = num_tiles * -(-columns // (TILE_COLUMNS * self.column_tiles))
        programs = self.programs
        if not programs and num_tiles >= room:
            programs = -(-num_tiles // -(-num_tiles // room))
        elif not programs:
            programs = num_tiles * (room // num_tiles)
        return min(programs, units)


Shape = tuple[int, int, bool]
"""Rows of weight, columns of weight, gated."""
Choices = tuple[tuple[int, StreamPlan | None], ...]
"""(up to that many rows, the plan; None: written out), ascending. More rows than the last entry's: written out."""

_H200: Final[Mapping[Shape, Choices]] = MappingProxyType(
    {
        (6144, 4096, False): (
            (8, StreamPlan(1, 7, residents=2, programs=264, slices=True)),
            (16, StreamPlan(2, 4, residents=3, programs=384)),
            (64, StreamPlan(2, 5, programs=96)),
        ),
        (4096, 4096, False): (
            (8, StreamPlan(1, 5, residents=3, programs=256, slices=True)),
            (16, StreamPlan(2, 4, residents=3, programs=128)),
            (64, StreamPlan(2, 2, residents=2, programs=256)),
        ),
        (28672, 4096, True): (
            (8, StreamPlan(2, 4, residents=2, programs=224)),
            (16, StreamPlan(2, 2, residents=3, programs=224)),
            (64, StreamPlan(2, 4, programs=132)),
        ),
        (4096, 14336, False): (
            (8, StreamPlan(2, 3, residents=4, programs=512)),
            (16, StreamPlan(2, 6, residents=2, programs=256)),
            (64, StreamPlan(2, 2, residents=2, programs=256)),
        ),
    }
)
"""Measured for 1 and 16 rows in whole layers of Llama 3 8B, for 64 map by map."""

TUNED: Final[Mapping[str, Mapping[Shape, Choices]]] = MappingProxyType({"NVIDIA H200": _H200})
"""Beginning of the card's name → shape → choices, for 4 bits in groups of 128."""


def stage_bytes(plan: StreamPlan, weight: PackedWeight, num_tokens: int, *, gated: bool) -> int:
    """Shared memory of a copy."""
    tile = 4 * weight.words.shape[2] + 4 * weight.params.shape[2] * weight.params.shape[3]
    if weight.high is not None:
        tile += weight.high.shape[2] * weight.high.element_size()
    halves = 2 if gated else 1
    rows = plan.block_m(num_tokens)
    if plan.slices:  # a quarter of the rows of four tiles
        return halves * tile + 2 * SLICE_COLUMNS * rows
    return plan.column_tiles * (halves * tile + 2 * TILE_COLUMNS * rows)


def plan_for(weight: PackedWeight, num_tokens: int, *, gated: bool, may_split: bool) -> StreamPlan | None:
    """The plan for that many rows of x; None: another kernel, or weights written out.

    may_split: whether there are tickets.
    """
    device = weight.words.device
    if not can_stream(device) or not may_split or num_tokens < 1:
        return None
    shape = (weight.rows, weight.columns, gated)
    choices = (of_card(card_name(device), TUNED) or {}).get(shape)
    if choices is None:
        plan = _by_rule(num_tokens, gated) if num_tokens <= MAX_STREAMING_ROWS else None
    else:
        plan = next((plan for most, plan in choices if num_tokens <= most), None)
    if plan is None:
        return None
    plan = fitting(plan, weight, num_tokens, gated=gated)
    out_size = weight.rows // 2 if gated else weight.rows
    if not plan.slices and plan.num_tiles(num_tokens, out_size) > NUM_TICKETS:
        return None
    return plan


def fitting(plan: StreamPlan, weight: PackedWeight, num_tokens: int, *, gated: bool) -> StreamPlan:
    """With as many stages at most as find room in shared memory; slices only where they can be cut."""
    if plan.slices and not plan.cuts_slices(weight, num_tokens):
        plan = replace(plan, slices=False)
    room = _SHARED_BYTES[plan.residents] // stage_bytes(plan, weight, num_tokens, gated=gated)
    return replace(plan, num_stages=max(2, min(plan.num_stages, room)))


@cache
def _by_rule(num_tokens: int, gated: bool) -> StreamPlan:
    slices = num_tokens <= _MAX_SLICE_ROWS and not gated
    return StreamPlan(2 if num_tokens <= 16 else 1, _MAX_STAGES, residents=2, slices=slices)
