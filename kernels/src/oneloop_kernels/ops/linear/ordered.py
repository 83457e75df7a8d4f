"""Linear maps in the fixed order (oneloop_kernels.order).

On Hopper the columns of x are cut into `num_pieces` equal pieces, as the weight's shape says. Each piece of a result is
one sum over its columns, ascending, in the accumulator of the tensor cores, 16 columns an instruction; the pieces are
added up in ascending order, in float32. Which rows and results share a tile, and on which side of the product the
weights stand, changes no bit of it, so that both kernels may be taken, as the number of rows has it: `triton.stream`,
each of whose programs has one piece or whole tiles, and `triton.dense`. Elsewhere one tile of `triton.few_rows` serves
any number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from oneloop_kernels.launch import INTERPRETED, num_sms
from oneloop_kernels.ops.linear import NUM_TICKETS, plans
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

_TILE: Final = 64
"""Results that a program has at least, while weights stream."""
_MOST_PROGRAMS: Final = 160
"""A weight is cut into pieces while their number times that of its tiles stays within it: about one for each
multiprocessor of the larger cards. Part of the order, never changed for another card."""
_LEAST_PIECE: Final = 6
"""Blocks of a piece."""
_BLOCK_BYTES: Final = 256
"""Of a row of the weight: what is copied at a time while weights stream."""
_STREAMED_ROWS: Final = 64
_DENSE_ROWS: Final = 128
_SHARED_BYTES: Final = 208 << 10
_MAX_STAGES: Final = 11
_FEW_ROWS: Final = 16
_FEW_BLOCKS: Final = 16
"""Up to so many rows, and blocks of a program, two programs of the streaming kernel share a multiprocessor: the next
kernel's copies begin beside it. With more blocks that costs more than it saves: 43 µs, not 26, for 4096 × 14336."""
_ANYWHERE: Final = FewRowsPlan(use_dot=True, block_n=64, block_k=32, num_stages=3)
"""Of cards without Hopper's tensor cores; its tile of x has always _ANYWHERE_ROWS rows."""
_ANYWHERE_ROWS: Final = 64


def linear(call: LinearCall) -> torch.Tensor:
    """See ops.linear.Linear: a row of the result depends on that row of x alone, bit by bit."""
    call = normed(call)
    x, weight = call.x, call.weight
    if not INTERPRETED and can_stream(x.device) and may_stream(x, weight):
        shape = (weight.shape[0], weight.shape[1], call.gated)
        has_tickets = call.tickets is not None and len(call.tickets) >= NUM_TICKETS
        return planned(plan_for(x.device, x.dtype, x.shape[0], shape, has_tickets), call).run()
    return few_rows(_ANYWHERE, call, block_m=_ANYWHERE_ROWS).run()


def num_pieces(shape: Shape, item_bytes: int = 2) -> int:
    """Into how many pieces the columns are cut: more where results are few, so that a few rows occupy a card."""
    tiles, blocks = -(-_out_size(shape) // _TILE), shape[1] * item_bytes / _BLOCK_BYTES
    pieces = 1
    while (
        2 * pieces * tiles <= _MOST_PROGRAMS
        and blocks % (2 * pieces) == 0
        and blocks / (2 * pieces) >= _LEAST_PIECE
    ):
        pieces *= 2
    return pieces


@cache
def plan_for(
    device: torch.device, dtype: torch.dtype, num_tokens: int, shape: Shape, has_tickets: bool
) -> StreamPlan | DensePlan:
    """The plan for that many rows of x, on Hopper. Without tickets none that cuts tiles."""
    default = plans.plan_for(device, dtype, num_tokens, shape, may_split=True, may_stream=True)
    return in_order(default, device, num_tokens, shape, has_tickets)


def in_order(
    default: plans.Plan | None,
    device: torch.device,
    num_tokens: int,
    shape: Shape,
    has_tickets: bool,
    item_bytes: int = 2,
) -> StreamPlan | DensePlan:
    """The default plan where it keeps the order, else one by a rule. item_bytes: 1 for e4m3 with scales per row."""
    pieces = num_pieces(shape, item_bytes)
    if isinstance(default, DensePlan):
        return replace(default, pieces=pieces)
    if isinstance(default, StreamPlan) and pieces == 1:
        return replace(default, whole=True)
    if num_tokens > _STREAMED_ROWS or (pieces > 1 and not has_tickets):
        return _dense(num_sms(device), num_tokens, shape, pieces)
    if (
        isinstance(default, StreamPlan)
        and default.block_n == _TILE
        and default.block_m(num_tokens) >= num_tokens
    ):
        tiles = default.num_tiles(num_tokens, _out_size(shape))
        if default.grid(device, tiles, -(-shape[1] // default.block_k)) == tiles * pieces:
            return default
    return _streaming(num_tokens, shape, pieces, item_bytes)


def _streaming(num_tokens: int, shape: Shape, pieces: int, item_bytes: int = 2) -> StreamPlan:
    """A program for each piece of each tile, or whole tiles. num_tokens: at most _STREAMED_ROWS, one tile of rows."""
    halves = 2 if shape[2] else 1
    plan = StreamPlan(block_n=_TILE, block_k=_BLOCK_BYTES // item_bytes, num_stages=2, whole=pieces == 1)
    stage_bytes = _BLOCK_BYTES * (halves * _TILE + plan.block_m(num_tokens))
    blocks = -(-shape[1] // (plan.block_k * pieces))
    shares = num_tokens <= _FEW_ROWS and blocks <= _FEW_BLOCKS
    room = _SHARED_BYTES // 2 if shares else _SHARED_BYTES
    programs = 0 if pieces == 1 else pieces * -(-_out_size(shape) // _TILE)
    return replace(plan, num_stages=min(_MAX_STAGES, room // stage_bytes), programs=programs)


_WIDTHS: Final = {
    1: ((256,), (128, 64), (128,), (64, 32), (64,), (32,)),
    2: ((128,), (64, 32), (64,), (32, 16), (32,)),
}
"""By halves of a result: widths of chunks, wide ones first."""
_TILE_COST: Final = 32
"""What a tile takes beside its products, in columns: rows of x are read for each."""


def _dense(sms: int, num_tokens: int, shape: Shape, pieces: int) -> DensePlan:
    """The tiles with which the busiest program ends first. sms: multiprocessors."""
    token_tiles = -(-num_tokens // _DENSE_ROWS)
    halves = 2 if shape[2] else 1

    def columns_of_the_busiest(widths: tuple[int, ...]) -> int:
        tiles = token_tiles * -(-_out_size(shape) // sum(widths))
        return -(-tiles // sms) * (sum(widths) + _TILE_COST)

    widths = min(_WIDTHS[halves], key=columns_of_the_busiest)
    stage_bytes = 2 * DENSE_BLOCK_K * (halves * sum(widths) + _DENSE_ROWS)
    return DensePlan(widths, min(_MAX_STAGES, _SHARED_BYTES // stage_bytes), _DENSE_ROWS, pieces)


def _out_size(shape: Shape) -> int:
    """Columns of the result."""
    return shape[0] // 2 if shape[2] else shape[0]
