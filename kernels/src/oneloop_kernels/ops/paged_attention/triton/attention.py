"""The device-planned attention (contract DeviceAttention): workspaces, launches of the planning and of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton

from oneloop_kernels.launch import INTERPRETED, card_name, num_sms, pdl_options
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales
from oneloop_kernels.ops.paged_attention.triton import hopper
from oneloop_kernels.ops.paged_attention.triton.configs import config_for
from oneloop_kernels.ops.paged_attention.triton.decode import decode_kernel
from oneloop_kernels.ops.paged_attention.triton.ordered_attention import OrderedAttention, OrderedPlan
from oneloop_kernels.ops.paged_attention.triton.planning import (
    COST_CLASSES,
    ITEM_FIELDS,
    KEYS,
    PROGRAM_FIELDS,
    common_kernel,
    decode_plan_kernel,
    prefill_plan_kernel,
)
from oneloop_kernels.ops.paged_attention.triton.tiles import tiles_kernel
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from oneloop_kernels.ops.paged_attention import AttentionShape, AttentionStep
    from oneloop_kernels.ops.paged_attention.triton.configs import AttentionConfig, DecodeConfig

_LOG2_E = math.log2(math.e)
_MERGE_ELEMENTS = 8192
"""Of partial results that are added up at a time."""
_INTERPRETED_SMS = 2
"""Multiprocessors that the interpreter stands for: it runs programs one after the other, those without work too."""


class TritonAttention:
    """See the contract DeviceAttention; made as DeviceAttentionFactory says."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_rows: int,
        max_tokens: int,
        max_blocks_per_row: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
        ordered: bool = False,
        config: AttentionConfig | None = None,
        sms: int | None = None,
    ) -> None:
        """config, sms (multiprocessors to fill): for tuning and tests; None: those of the device."""
        _check(shape)
        self.shape = shape
        self._device = device
        self._pdl = dict(pdl_options(device))
        dim = triton.next_power_of_2(max(16, shape.head_dim))
        if config is None:
            config = config_for(card_name(device), dtype.itemsize, dim, shape.num_heads // shape.num_kv_heads)
        self.config = config
        self._group = shape.num_heads // shape.num_kv_heads
        self._group_rows = triton.next_power_of_2(self._group)
        multiprocessors = sms or (_INTERPRETED_SMS if INTERPRETED else num_sms(device))
        self._multiprocessors = multiprocessors
        self._tiles_programs = multiprocessors * config.tiles.programs_per_sm
        self._shared_programs = multiprocessors * config.shared.programs_per_sm
        self._tokens = config.tiles.block_m // self._group
        self._shared_tokens = config.shared.block_m // self._group
        if min(self._tokens, self._shared_tokens) == 0:
            raise ValueError(
                f"{self._group} query heads per key head do not fit tiles of {config.tiles.block_m} rows"
            )
        self._unit = math.lcm(int(KEYS), shape.block_size)
        capacity = max_blocks_per_row * shape.block_size
        self._can_share = (
            shape.sliding_window is None
            and max_rows >= config.min_sharers
            and capacity > max(config.min_shared, self._unit)
        )
        self._on_hopper = not INTERPRETED and hopper.fits(shape, dtype, cache_dtype or dtype)
        self._is_narrow = cache_dtype is FP8
        self._planned_together = 1
        self._max_rows = max_rows
        self._max_items = triton.cdiv(max_tokens, self._tokens) + min(max_rows, max_tokens)
        self._space = _Workspace.make(
            multiprocessors * config.most_programs_per_sm,
            max(self._group_rows, hopper.QUERIES if self._is_narrow else 1),
            max_rows,
            self._max_items,
            shape,
            config,
            self._can_share,
            device,
        )
        self._layer_constants = _layer_constants(shape, dim)
        cap = shape.soft_cap
        self._scale = shape.scale * _LOG2_E if cap is None else 2.0 * _LOG2_E * shape.scale / cap
        self._ordered = None
        if ordered and self._on_hopper and not self._is_narrow:
            self._ordered = OrderedAttention(
                shape,
                scale_log2=self._scale,
                max_rows=max_rows,
                max_tokens=max_tokens,
                device=device,
                sms=sms,
            )

    def plan(
        self, step: AttentionStep, num_rows: int, num_tokens: int, has_multi: bool, *, may_share: bool = True
    ) -> TritonPlan | TilesPlan | OrderedPlan:
        """See the contract."""
        if order_is_fixed():
            return self._plan_in_order(step, num_rows, has_multi)
        shares = may_share and self._can_share and num_rows >= self.config.min_sharers
        if shares:
            self._plan_common(step, num_rows)
        streams = self._on_hopper and not shares
        decode = self.config.decode_for(num_rows, streams=streams, narrow=self._is_narrow)
        self._plan_decode(step, decode, shares, self._together(decode) if streams else 1)
        if has_multi:
            self._plan_prefill(step)
        return TritonPlan(self, step, decode, shares, has_multi)

    def _plan_in_order(self, step: AttentionStep, num_rows: int, has_multi: bool) -> TilesPlan | OrderedPlan:
        """The fixed order. Without ordered.py a row with one query is computed as one with several."""
        if self._ordered is not None:
            return self._ordered.plan(step, num_rows, has_multi)
        step = replace(step, num_single=self._space.none_single)
        self._plan_prefill(step)
        return TilesPlan(self, step)

    def _programs(self, decode: DecodeConfig) -> int:
        return self._multiprocessors * decode.programs_per_sm

    def _plan_common(self, step: AttentionStep, num_rows: int) -> None:
        common_kernel[(num_rows,)](
            step.row_slot, step.seq_lens, step.num_single, step.block_tables, step.block_tables.stride(0),
            self._space.common,
            BLOCK_SIZE=self.shape.block_size, UNIT=self._unit, CHUNK=256, num_warps=2, **self._pdl,
        )  # fmt: skip

    def _together(self, decode: DecodeConfig) -> int:
        """Key heads that stream.py takes at once."""
        return hopper.heads_together(self.shape, decode.together) if self._is_narrow else 1

    def _plan_decode(self, step: AttentionStep, decode: DecodeConfig, shares: bool, together: int) -> None:
        """together: the plan is of key heads by so many at once, which only stream.py reads."""
        space, config, programs = self._space, self.config, self._programs(decode)
        self._planned_together = together
        decode_plan_kernel[(1,)](
            step.row_slot, step.seq_lens, step.num_single, space.common,
            space.programs, space.split, space.ends,
            space.shared_lens, space.shared_chunks, space.run_first, space.run_common, space.run_rows,
            space.shared_items, space.num_shared_items, self._max_shared_items,
            programs, decode.min_tiles, self._shared_programs,
            KV_HEADS=self.shape.num_kv_heads // together, BLOCK_N=decode.block_n // together,
            WINDOW=self.shape.sliding_window or 0,
            PROGRAM_LANES=triton.next_power_of_2(programs), ROW_LANES=space.ends.shape[0],
            ROW_STEPS=space.ends.shape[0].bit_length(), SHARED=shares, MIN_SHARED=config.min_shared,
            MIN_SHARERS=config.min_sharers, CHUNK=config.chunk, MAX_CHUNKS=config.max_chunks,
            TOKENS=self._shared_tokens, MAX_TILES=0, num_warps=4, **self._pdl,
        )  # fmt: skip

    def _plan_prefill(self, step: AttentionStep) -> None:
        space = self._space
        prefill_plan_kernel[(1,)](
            step.row_slot, step.seq_lens, step.query_start, step.num_rows, step.num_single,
            space.prefill_ends, space.classes, space.items, space.num_items, self._max_items,
            TOKENS=self._tokens, BLOCK_N=self.config.tiles.block_n, WINDOW=self.shape.sliding_window or 0,
            ROW_LANES=space.ends.shape[0], ROW_STEPS=space.ends.shape[0].bit_length(),
            ITEM_LANES=triton.next_power_of_2(self._max_items), num_warps=8, **self._pdl,
        )  # fmt: skip

    @property
    def _max_shared_items(self) -> int:
        return self._space.shared_items.shape[0]

    def run_tiles(
        self, step: AttentionStep, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None, scales: KvScales, *, shared: bool,
    ) -> None:  # fmt: skip
        """Launch tiles.py on one layer: the shared parts of single rows, or the rows with several queries."""
        space = self._space
        partial = shared and space.shared_acc is not None
        if not partial and self.config.tiles.ring and self._runs_on_hopper(cache, sinks):
            hopper.launch_prefill(
                qkv, cache, out, self.shape, step.block_tables, step.block_tables.stride(0),
                space.items, space.num_items, self._scale * scales.key, scales.value,
                programs=self._multiprocessors, ring=self.config.tiles.ring, pdl=self._pdl,
            )  # fmt: skip
            return
        tiles = self.config.shared if partial else self.config.tiles
        dim = int(self._layer_constants["DIM"])
        aligned = self.shape.head_dim * cache.element_size() % 16 == 0
        use_tma = tiles.tma and aligned and self.shape.block_size % tiles.block_n == 0
        tiles_kernel[(self._shared_programs if partial else self._tiles_programs,)](
            qkv, cache, _descriptor(cache, tiles.block_n, dim) if use_tma else None,
            space.shared_acc if partial else out, space.shared_norm if partial else None,
            None if partial else sinks, step.block_tables, step.block_tables.stride(0),
            space.shared_items if partial else space.items,
            space.num_shared_items if partial else space.num_items,
            space.shared_counters if partial else space.counters,
            self._max_rows, cache.stride(0), cache.stride(1), cache.stride(2), self._scale * scales.key,
            scales.value,
            **self._layer_constants, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            HAS_SINKS=sinks is not None and not partial, PARTIAL=partial,
            TMA=use_tma, STAGES=tiles.stages, num_warps=tiles.warps, **_registers(tiles.max_registers),
            **self._pdl,
        )  # fmt: skip

    def _runs_on_hopper(self, cache: torch.Tensor, sinks: torch.Tensor | None) -> bool:
        """By stream.py and prefill.py, whose orders are others than the fixed one."""
        return self._on_hopper and not order_is_fixed() and sinks is None and hopper.lies_densely(cache)

    def run_decode(
        self, step: AttentionStep, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None, scales: KvScales, config: DecodeConfig, *, shares: bool, beside: bool,
    ) -> None:  # fmt: skip
        """Launch decode.py on one layer. beside: directly after run_tiles for rows with several queries."""
        space = self._space
        streams = bool(config.stream_stages) and not shares and self._runs_on_hopper(cache, sinks)
        together = self._together(config) if streams else 1
        if together != self._planned_together:
            self._plan_decode(step, config, shares, together)
        if streams:
            hopper.launch_stream(
                qkv, cache, out, self.shape, step.row_slot, step.seq_lens, step.block_tables,
                step.block_tables.stride(0), space.programs, space.split, space.partial_acc, space.partial_norm,
                space.tickets, self._scale * scales.key, scales.value,
                programs=self._programs(config), programs_per_sm=config.programs_per_sm,
                tile=config.block_n, together=together, stages=config.stream_stages, beside=beside, pdl=self._pdl,
            )  # fmt: skip
            return
        limits = [config.max_registers, self.config.beside_registers if beside or shares else None]
        registers = min((limit for limit in limits if limit is not None), default=None)
        dim = self._layer_constants["DIM"]
        merge = max(2, min(16, _MERGE_ELEMENTS // (self._group_rows * int(dim))))
        decode_kernel[(self._programs(config),)](
            qkv, cache, out, sinks, step.row_slot, step.seq_lens, step.block_tables, step.block_tables.stride(0),
            space.programs, space.split, space.shared_lens, space.shared_chunks,
            space.partial_acc, space.partial_norm, space.tickets, space.shared_acc, space.shared_norm, self._max_rows,
            cache.stride(0), cache.stride(1), cache.stride(2), self._scale * scales.key,
            scales.value,
            **self._layer_constants, BLOCK_N=config.block_n, GROUP_ROWS=self._group_rows, MERGE=merge,
            HAS_SINKS=sinks is not None, SHARED=self.config.max_chunks if shares else 0,
            BESIDE=beside or shares, WAIT_SHARED=shares and not beside, STAGES=config.stages, num_warps=config.warps,
            **_registers(registers), **self._pdl,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """See the contract DevicePlan."""

    attention: TritonAttention
    step: AttentionStep
    decode: DecodeConfig
    shares: bool
    has_multi: bool

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        *, scales: KvScales = UNSCALED,
    ) -> None:  # fmt: skip
        """See the contract."""
        if self.shares:
            self.attention.run_tiles(self.step, qkv, cache, out, sinks, scales, shared=True)
        if self.has_multi:
            self.attention.run_tiles(self.step, qkv, cache, out, sinks, scales, shared=False)
        self.attention.run_decode(
            self.step, qkv, cache, out, sinks, scales, self.decode, shares=self.shares, beside=self.has_multi
        )


@dataclass(frozen=True, slots=True)
class TilesPlan:
    """See the contract DevicePlan: all rows by tiles.py, whatever the number of their queries."""

    attention: TritonAttention
    step: AttentionStep

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        *, scales: KvScales = UNSCALED,
    ) -> None:  # fmt: skip
        """See the contract."""
        self.attention.run_tiles(self.step, qkv, cache, out, sinks, scales, shared=False)


@dataclass(frozen=True, slots=True)
class _Workspace:
    """What the kernels write for one another; what is int32 and shapes are said where it is used (planning.py)."""

    programs: torch.Tensor
    split: torch.Tensor
    ends: torch.Tensor
    prefill_ends: torch.Tensor
    classes: torch.Tensor
    items: torch.Tensor
    num_items: torch.Tensor
    none_single: torch.Tensor
    counters: torch.Tensor
    tickets: torch.Tensor
    partial_acc: torch.Tensor
    partial_norm: torch.Tensor
    common: torch.Tensor | None
    shared_lens: torch.Tensor | None
    shared_chunks: torch.Tensor | None
    run_first: torch.Tensor | None
    run_common: torch.Tensor | None
    run_rows: torch.Tensor | None
    shared_items: torch.Tensor
    num_shared_items: torch.Tensor
    shared_counters: torch.Tensor
    shared_acc: torch.Tensor | None
    shared_norm: torch.Tensor | None

    @classmethod
    def make(
        cls, programs: int, group_rows: int, max_rows: int, max_items: int, shape: AttentionShape,
        config: AttentionConfig, can_share: bool, device: torch.device,
    ) -> _Workspace:  # fmt: skip
        """Counters and tickets start at zero; the rest is written before it is read."""

        def ints(*sizes: int) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=torch.int32, device=device)

        def floats(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.float32, device=device)

        lanes = triton.next_power_of_2(max_rows + 1)
        sharing = lanes if can_share else 0
        shared = (config.max_chunks, max_rows, shape.num_heads)
        return cls(
            split=ints(3),
            programs=ints(programs, int(PROGRAM_FIELDS)),
            ends=ints(lanes),
            prefill_ends=ints(lanes),
            classes=ints(int(COST_CLASSES)),
            items=ints(max_items, int(ITEM_FIELDS)),
            num_items=ints(1),
            none_single=ints(1),
            counters=ints(2),
            tickets=ints(programs),
            partial_acc=floats(2 * programs, group_rows, shape.head_dim),
            partial_norm=floats(2, 2 * programs, group_rows),
            common=ints(lanes) if sharing else None,
            shared_lens=ints(lanes) if sharing else None,
            shared_chunks=ints(lanes) if sharing else None,
            run_first=ints(lanes) if sharing else None,
            run_common=ints(lanes) if sharing else None,
            run_rows=ints(lanes) if sharing else None,
            shared_items=ints(max(1, sharing and config.max_chunks * max_rows), int(ITEM_FIELDS)),
            num_shared_items=ints(1),
            shared_counters=ints(2),
            shared_acc=floats(*shared, shape.head_dim) if sharing else None,
            shared_norm=floats(*shared, 2) if sharing else None,
        )


def _layer_constants(shape: AttentionShape, dim: int) -> dict[str, int | float]:
    """Compile-time constants of both kernels. dim: head_dim rounded up."""
    return {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "DIM": dim,
        "BLOCK_SIZE": shape.block_size,
        "WINDOW": shape.sliding_window or 0,
        "SOFT_CAP": shape.soft_cap or 0.0,
    }


def _registers(limit: int | None) -> dict[str, int]:
    """Launch option. Triton's name for it is maxnreg."""
    return {} if limit is None else {"maxnreg": limit}


def _check(shape: AttentionShape) -> None:
    """ValueError naming what the kernels cannot compute."""
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"num_heads {shape.num_heads} is no multiple of num_kv_heads {shape.num_kv_heads}")
    if shape.scale <= 0:
        raise ValueError(f"scale must be positive, is {shape.scale}")
    if shape.soft_cap is not None and shape.soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive or None, is {shape.soft_cap}")
    if shape.sliding_window is not None and shape.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, is {shape.sliding_window}")


def _descriptor(cache: torch.Tensor, block_n: int, dim: int) -> object:
    """Of one layer, for boxes of block_n tokens of one head; dim: head_dim rounded up, filled with zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, block_n, 1, dim])
