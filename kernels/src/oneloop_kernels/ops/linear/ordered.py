"""Linear maps in the fixed order (oneloop_kernels.order).

On Hopper every result is one sum over the columns of x, ascending, in the accumulator of the tensor cores: 16 columns
an instruction, nothing split. Which rows and results share a tile, and on which side of the product the weights stand,
changes no bit of it, so that both kernels may be taken, as the number of rows has it: `triton.stream` with whole tiles,
and `triton.dense`. Elsewhere one tile of `triton.few_rows` serves any number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.launch import INTERPRETED, num_sms
from oneloop_kernels.ops.linear.launches import few_rows, may_stream, normed, planned
from oneloop_kernels.ops.linear.plans import (
    DENSE_BLOCK_K,
    DensePlan,
    FewRowsPlan,
    Shape,
    StreamPlan,
    can_stream,
)

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall

_SHARED_BYTES: Final = 208 << 10
_MAX_STAGES: Final = 11
_STREAMED_ROWS: Final = 64
_DENSE_ROWS: Final = 128
_ANYWHERE: Final = FewRowsPlan(use_dot=True, block_n=64, block_k=32, num_stages=3)
"""Of cards without Hopper's tensor cores; its tile of x has always _ANYWHERE_ROWS rows."""
_ANYWHERE_ROWS: Final = 64


def linear(call: LinearCall) -> torch.Tensor:
    """See ops.linear.Linear: a row of the result depends on that row of x alone, bit by bit."""
    call = normed(call)
    x, weight = call.x, call.weight
    if not INTERPRETED and can_stream(x.device) and may_stream(x, weight):
        shape = (weight.shape[0], weight.shape[1], call.gated)
        return planned(plan_for(x.device, x.shape[0], shape), call).run()
    return few_rows(_ANYWHERE, call, block_m=_ANYWHERE_ROWS).run()


@cache
def plan_for(device: torch.device, num_tokens: int, shape: Shape) -> StreamPlan | DensePlan:
    """The plan for that many rows of x, on Hopper."""
    return by_rule(num_sms(device), num_tokens, shape)


def by_rule(sms: int, num_tokens: int, shape: Shape) -> StreamPlan | DensePlan:
    """Up to 64 rows weights stream; beyond, the tiles with which the busiest program ends first.

    A few multiprocessors read a small weight nearly as fast as all do (64 of an H200's 132 in 29.3 µs against 29.0 for
    4096 × 14336). sms: multiprocessors.
    """
    out_size = shape[0] // 2 if shape[2] else shape[0]
    halves = 2 if shape[2] else 1
    if num_tokens <= _STREAMED_ROWS:
        plan = StreamPlan(block_n=64, block_k=128, num_stages=2, whole=True)
        stage_bytes = 2 * plan.block_k * (halves * plan.block_n + plan.block_m(num_tokens))
        return replace(plan, num_stages=min(_MAX_STAGES, _SHARED_BYTES // stage_bytes))
    token_tiles = -(-num_tokens // _DENSE_ROWS)
    best = min(_WIDTHS[halves], key=lambda widths: _rounds(widths, sms, token_tiles, out_size))
    return _dense(best, halves)


_WIDTHS: Final = {
    1: ((256,), (128, 64), (128,), (64, 32), (64,), (32,)),
    2: ((128,), (64, 32), (64,), (32, 16), (32,)),
}
"""By halves of a result: widths of chunks, wide ones first."""
_TILE_COST: Final = 32
"""What a tile takes beside its products, in columns: rows of x are read for each."""


def _rounds(widths: tuple[int, ...], sms: int, token_tiles: int, out_size: int) -> int:
    """Time that the busiest program takes, in columns of results."""
    tiles = token_tiles * -(-out_size // sum(widths))
    return -(-tiles // sms) * (sum(widths) + _TILE_COST)


def _dense(widths: tuple[int, ...], halves: int) -> DensePlan:
    stage_bytes = 2 * DENSE_BLOCK_K * (halves * sum(widths) + _DENSE_ROWS)
    return DensePlan(widths, min(_MAX_STAGES, _SHARED_BYTES // stage_bytes), _DENSE_ROWS)
