"""8-bit linear maps in the fixed order (oneloop_kernels.order): which plan, so that a row's bits are its own.

With scales per row the order is that of linear.ordered: pieces of the columns, each one sum in the accumulator of the
tensor cores, added up in float32 before they are scaled. With scales per block the products of each are scaled, and
added up, ascending; `linear.triton.stream` and `triton.tiles` do it alike. On cards other than Hopper one tile of the
latter serves any number of rows. The quantisation before a map has one shape of program as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from oneloop_kernels.ops.fp8_linear import plans
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan
from oneloop_kernels.ops.linear.ordered import in_order
from oneloop_kernels.ops.linear.plans import StreamPlan, can_stream

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.fp8_linear.plans import Plan
    from oneloop_kernels.ops.linear.plans import Shape

_TILES: Final = TilesPlan(64, num_warps=4)
_MANY_ROWS: Final = TilesPlan(128)


@cache
def plan_for(
    device: torch.device,
    num_tokens: int,
    shape: Shape,
    *,
    by_block: bool,
    may_stream: bool,
    has_tickets: bool,
) -> Plan:
    """The plan for that many rows of x. may_stream: as plans.plan_for. has_tickets: whether tiles may be cut."""
    if not may_stream or not can_stream(device):
        return _TILES
    if by_block:
        return _by_block(num_tokens, shape)
    return in_order(None, device, num_tokens, shape, has_tickets, item_bytes=1)


def _by_block(num_tokens: int, shape: Shape) -> Plan:
    """Whole tiles while weights stream, whose sizes change no bit."""
    default = plans.plan_by_rule(num_tokens, shape, by_block=True)
    return replace(default, whole=True) if isinstance(default, StreamPlan) else _MANY_ROWS
