"""Attention in the fixed order on Hopper: workspaces, and launches of the kernels of ordered.py.

Kernels are imported when they are launched: the interpreter has none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales
from oneloop_kernels.ops.paged_attention.triton import hopper
from oneloop_kernels.ops.paged_attention.triton.planning import (
    COST_CLASSES,
    ITEM_FIELDS,
    PROGRAM_FIELDS,
    decode_plan_kernel,
    prefill_plan_kernel,
)

if TYPE_CHECKING:
    from oneloop_kernels.ops.paged_attention import AttentionShape, AttentionStep

MAX_PARTS: Final = 16_384
"""Results of splits that are kept beside each other; with more splits in a step no context is cut."""


class _Decode(NamedTuple):
    """How decode_kernel is spread; no part of the order."""

    programs_per_sm: int
    stages: int


_ONE_ROW: Final = _Decode(1, 6)
"""With room for all tiles of a split and the next one's first."""
_MANY_ROWS: Final = _Decode(2, 3)
_BLOCK_QUERIES: Final = 32
_BLOCK_PROGRAMS_PER_SM: Final = 2
_BLOCK_STAGES: Final = 2
_SPLIT: Final = 256
"""ordered.SPLIT."""


class OrderedAttention:
    """Plans and runs steps of one shape, as DeviceAttention does: see there, and hopper.fits."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        scale_log2: float,
        max_rows: int,
        max_tokens: int,
        device: torch.device,
        sms: int | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        """scale_log2: of scores, into the base-2 domain. sms, max_parts: others than the device's, for tests."""
        self.shape = shape
        self._scale = scale_log2
        self._sms = sms or num_sms(device)
        most_programs = self._sms * max(_ONE_ROW.programs_per_sm, _MANY_ROWS.programs_per_sm)
        self._group = shape.num_heads // shape.num_kv_heads
        self._max_parts = max_parts
        self._pdl = dict(pdl_options(device))
        self._tokens = _BLOCK_QUERIES // self._group
        max_items = triton.cdiv(max_tokens, self._tokens) + min(max_rows, max_tokens)

        def ints(*sizes: int) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=torch.int32, device=device)

        self._row_lanes = triton.next_power_of_2(max_rows + 1)
        self._plan_space = ints(most_programs, int(PROGRAM_FIELDS))
        self._split = ints(3)
        self._ends = ints(self._row_lanes)
        self._block_ends = ints(self._row_lanes)
        self._classes = ints(int(COST_CLASSES))
        self._items = ints(max_items, int(ITEM_FIELDS))
        self._num_items = ints(1)
        self._tickets = ints(most_programs)
        parts = max_parts * self._group
        self._partial_acc = torch.empty(parts, shape.head_dim, dtype=torch.float32, device=device)
        self._partial_norm = torch.empty(2, parts, dtype=torch.float32, device=device)

    def plan(self, step: AttentionStep, num_rows: int, has_multi: bool) -> OrderedPlan:
        """Launch the planning of a step of so many rows at most."""
        decode = _ONE_ROW if num_rows == 1 else _MANY_ROWS
        programs = self._sms * decode.programs_per_sm
        decode_plan_kernel[(1,)](
            step.row_slot, step.seq_lens, step.num_single, None, self._plan_space, self._split, self._ends,
            None, None, None, None, None, self._items, self._num_items, 0, programs, 1, 0,
            KV_HEADS=self.shape.num_kv_heads, BLOCK_N=_SPLIT, WINDOW=0,
            PROGRAM_LANES=triton.next_power_of_2(programs), ROW_LANES=self._row_lanes,
            ROW_STEPS=self._row_lanes.bit_length(), SHARED=False, MIN_SHARED=0, MIN_SHARERS=0, CHUNK=1,
            MAX_CHUNKS=1, TOKENS=1, MAX_TILES=self._max_parts, num_warps=4, **self._pdl,
        )  # fmt: skip
        if has_multi:
            prefill_plan_kernel[(1,)](
                step.row_slot, step.seq_lens, step.query_start, step.num_rows, step.num_single,
                self._block_ends, self._classes, self._items, self._num_items, len(self._items),
                TOKENS=self._tokens, BLOCK_N=_SPLIT, WINDOW=0, ROW_LANES=self._row_lanes,
                ROW_STEPS=self._row_lanes.bit_length(), ITEM_LANES=triton.next_power_of_2(len(self._items)),
                num_warps=8, **self._pdl,
            )  # fmt: skip
        return OrderedPlan(self, step, decode, has_multi)

    def run_blocks(
        self, step: AttentionStep, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Rows with several queries, on one layer."""
        hopper.launch_blocks(
            qkv, cache, out, self.shape, step.block_tables, step.block_tables.stride(0),
            self._items, self._num_items, self._scale,
            programs=self._sms * _BLOCK_PROGRAMS_PER_SM, queries=_BLOCK_QUERIES, stages=_BLOCK_STAGES, pdl=self._pdl,
        )  # fmt: skip

    def run_decode(
        self, step: AttentionStep, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, decode: _Decode,
        *, beside: bool,
    ) -> None:  # fmt: skip
        """Rows with one query, on one layer. decode: as planned. beside: directly after run_blocks."""
        hopper.launch_ordered_decode(
            qkv, cache, out, self.shape, step.row_slot, step.seq_lens, step.block_tables,
            step.block_tables.stride(0), self._plan_space, self._split, self._partial_acc, self._partial_norm,
            self._tickets, self._max_parts, self._scale,
            programs=self._sms * decode.programs_per_sm, stages=decode.stages, beside=beside, pdl=self._pdl,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OrderedPlan:
    """See the contract DevicePlan; for caches that lie densely, and without sinks."""

    attention: OrderedAttention
    step: AttentionStep
    decode: _Decode
    has_multi: bool

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        *, scales: KvScales = UNSCALED,
    ) -> None:  # fmt: skip
        """See the contract. ValueError for what the kernels do not read."""
        if sinks is not None or scales != UNSCALED or not hopper.lies_densely(cache):
            raise ValueError(
                "attention in the fixed order wants a cache stored by head, no sinks and no scales"
            )
        if self.has_multi:
            self.attention.run_blocks(self.step, qkv, cache, out)
        self.attention.run_decode(self.step, qkv, cache, out, self.decode, beside=self.has_multi)
