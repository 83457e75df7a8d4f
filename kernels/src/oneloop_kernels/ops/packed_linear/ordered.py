"""Packed linear maps in the fixed order (oneloop_kernels.order): the bits of linear.ordered, the weight written out.

Few rows on Hopper are unpacked in the product, each weight rounded as it is when it is written out, by the tensor
core's instructions of four warps whatever the number of rows, in the same pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall
from oneloop_kernels.ops.linear.ordered import linear as plain_linear
from oneloop_kernels.ops.linear.ordered import num_pieces
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import TILE_ROWS
from oneloop_kernels.ops.packed_linear.launches import prepared, stream, unpacked
from oneloop_kernels.ops.packed_linear.plans import StreamPlan, fitting

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.packed_linear import PackedCall, PackedWeight

_STREAMED_ROWS: Final = 64
_LEAST_ROWS: Final = 32
_MAX_STAGES: Final = 16


@dataclass(frozen=True, slots=True)
class OrderedPlan(StreamPlan):
    """With fewer rows of x in a tile the kernel would take instructions of one warp, which add up otherwise."""

    def block_m(self, num_tokens: int) -> int:
        """Rows of x of a tile."""
        return max(_LEAST_ROWS, StreamPlan.block_m(self, num_tokens))


def linear(call: PackedCall) -> torch.Tensor:
    """See ops.packed_linear.PackedLinear: a row of the result depends on that row of x alone, bit by bit."""
    call = prepared(call)
    x = call.x
    readable = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and call.tickets is not None
    plan = plan_for(call.weight, x.shape[0], gated=call.gated) if readable and can_stream(x.device) else None
    if plan is not None:
        return stream(plan, call).run()
    result = plain_linear(
        LinearCall(
            x,
            unpacked(call.weight).run(),
            call.bias,
            gated=call.gated,
            residual=call.residual,
            tickets=call.tickets,
        )
    )
    return result if call.out is None or call.residual is not None else call.out.copy_(result)


def plan_for(weight: PackedWeight, num_tokens: int, *, gated: bool) -> StreamPlan | None:
    """On Hopper: a program for each piece of each tile. None: the weight is written out."""
    plan = _plan_for((weight.rows, weight.columns, gated), num_tokens)
    return None if plan is None else fitting(plan, weight, num_tokens, gated=gated)


@cache
def _plan_for(shape: tuple[int, int, bool], num_tokens: int) -> StreamPlan | None:
    out_size = shape[0] // 2 if shape[2] else shape[0]
    tiles = -(-out_size // TILE_ROWS)
    if not 0 < num_tokens <= _STREAMED_ROWS or tiles > NUM_TICKETS:
        return None
    programs = tiles * num_pieces(shape)
    return OrderedPlan(1, _MAX_STAGES, residents=2, programs=programs)
