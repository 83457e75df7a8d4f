"""Queries, keys and values of packed weights by one kernel of Hopper, which rotates and stores them too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop_kernels.ops.linear.heads import fits
from oneloop_kernels.ops.packed_linear.launches import may_stream, prepared, slices
from oneloop_kernels.ops.packed_linear.plans import plan_for

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear.heads import Surroundings
    from oneloop_kernels.ops.packed_linear import PackedCall


def project_and_store(call: PackedCall, around: Surroundings) -> torch.Tensor | None:
    """See ops.rope.RopeOps.project_and_store. Where the plan cuts slices, and heads are not normed."""
    num_tokens = call.x.shape[0]
    if around.norms is not None or not fits(around) or call.gated or call.residual is not None:
        return None
    plan = plan_for(call.weight, num_tokens, gated=False, may_split=call.tickets is not None)
    if plan is None or not plan.slices or not may_stream(call):
        return None
    inside = plan.takes_norm(call.weight, num_tokens)
    launch = slices(plan, prepared(call, norm_inside=inside), around)
    return launch.run().view(num_tokens, -1, around.cache.shape[3])
