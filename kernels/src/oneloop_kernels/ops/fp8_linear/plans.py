"""Which kernel computes an 8-bit map, and how it is cut: measured per card and shape, with a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from oneloop_kernels.launch import card_name, of_card
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.linear import NUM_TICKETS
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan, can_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from oneloop_kernels.ops.linear.plans import Shape

MAX_PLANNED_ROWS: Final = 512
MAX_STREAMING_ROWS: Final = 64
"""By the rule: up to here weights stream through shared memory."""
_STAGES_BYTES: Final = 208 << 10
_MAX_STAGES: Final = 12


@dataclass(frozen=True, slots=True)
class TilesPlan:
    """Constants of `triton.tiles`. block_n: results of a tile, half as many where gated."""

    block_m: int
    block_n: int = 128
    num_stages: int = 4
    num_warps: int = 8


Plan = StreamPlan | DensePlan | TilesPlan
Choices = tuple[tuple[int, Plan | None], ...]
"""(up to that many rows, the plan; None: cuBLAS), ascending. More rows: cuBLAS, or tiles where scales are by block."""

_H200: Final[Mapping[Shape, Choices]] = MappingProxyType(
    {
        (6144, 4096, False): (
            (1, StreamPlan(64, 256, 11, programs=96)),
            (8, StreamPlan(64, 256, 5, programs=192)),
            (16, StreamPlan(64, 256, 10, programs=96)),
            (32, StreamPlan(64, 256, 8, programs=96)),
            (64, StreamPlan(64, 256, 6, programs=96)),
            (128, DensePlan((64,), 8)),
            (256, DensePlan((64, 32), 7)),
        ),
        (4096, 4096, False): (
            (1, StreamPlan(64, 256, 11, programs=64)),
            (8, StreamPlan(64, 256, 5, programs=256)),
            (16, StreamPlan(64, 256, 5, programs=128)),
            (32, StreamPlan(64, 256, 8, programs=128)),
            (64, StreamPlan(64, 256, 6, programs=128)),
            (256, DensePlan((64,), 8)),
        ),
        (28672, 4096, True): (
            (8, StreamPlan(64, 256, 3, programs=224)),
            (16, StreamPlan(128, 256, 3, programs=112)),
            (32, StreamPlan(64, 256, 5, programs=112)),
            (64, StreamPlan(64, 256, 4, programs=112)),
            (128, DensePlan((64, 32, 16), 4)),
            (256, DensePlan((128,), 4)),
        ),
        (4096, 14336, False): (
            (1, StreamPlan(64, 256, 11, programs=128)),
            (8, StreamPlan(128, 256, 6, programs=128)),
            (16, StreamPlan(64, 256, 5, programs=256)),
            (32, StreamPlan(64, 256, 8, programs=128)),
            (64, StreamPlan(64, 256, 6, programs=128)),
            (128, StreamPlan(64, 128, 12, programs=128, most_rows=64)),
            (256, DensePlan((64,), 8)),
        ),
    }
)
"""Measured in chains of layers, with programmatic dependent launch (`oneloop_bench.kernels.fp8_chain`)."""

TUNED: Final[Mapping[str, Mapping[Shape, Choices]]] = MappingProxyType({"NVIDIA H200": _H200})
"""Beginning of the card's name → shape → choices, for scales per row."""


@cache
def plan_for(
    device: torch.device, num_tokens: int, shape: Shape, *, by_block: bool, may_stream: bool
) -> Plan | None:
    """The plan for that many rows of x; None: cuBLAS. may_stream: as gpu.may_stream; where not, it is always tiles."""
    if not (may_stream and can_stream(device)):
        return _tiles(num_tokens)
    tuned = None if by_block else (of_card(card_name(device), TUNED) or {}).get(shape)
    if tuned is not None:
        return next((plan for most, plan in tuned if num_tokens <= most), None)
    plan = plan_by_rule(num_tokens, shape, by_block=by_block)
    if isinstance(plan, StreamPlan) and plan.num_tiles(num_tokens, _out_size(shape)) > NUM_TICKETS:
        return _tiles(num_tokens)
    return plan


def plan_by_rule(num_tokens: int, shape: Shape, *, by_block: bool) -> Plan | None:
    """On Hopper, for shapes and scales that have not been measured."""
    if 0 < num_tokens <= MAX_STREAMING_ROWS:
        return _streaming(num_tokens, shape, by_block=by_block)
    return _tiles(num_tokens) if by_block or not num_tokens else None


def _out_size(shape: Shape) -> int:
    """Columns of the result."""
    return shape[0] // 2 if shape[2] else shape[0]


def _streaming(num_tokens: int, shape: Shape, *, by_block: bool) -> StreamPlan:
    """All of shared memory under way."""
    halves = 2 if shape[2] else 1
    block_k = BLOCK if by_block else 2 * BLOCK
    plan = StreamPlan(
        block_n=64, block_k=block_k, num_stages=2, most_rows=32 if by_block and shape[2] else 128
    )
    stage_bytes = plan.block_k * (halves * plan.block_n + plan.block_m(num_tokens))
    return replace(plan, num_stages=min(_MAX_STAGES, _STAGES_BYTES // stage_bytes))


def _tiles(num_tokens: int) -> TilesPlan:
    if num_tokens <= 16:
        return TilesPlan(16, num_warps=4)
    return TilesPlan(64, num_warps=4) if num_tokens <= 64 else TilesPlan(128)
