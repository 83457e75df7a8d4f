"""Queries, keys and values of packed weights by one kernel of Hopper, which rotates and stores them too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oneloop_kernels.ops.linear.heads import fits
from oneloop_kernels.ops.packed_linear.launches import may_stream, prepared, slices
from oneloop_kernels.ops.packed_linear.plans import fitting, plan_for

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear.heads import Surroundings
    from oneloop_kernels.ops.linear.launches import Launch
    from oneloop_kernels.ops.packed_linear import PackedCall
    from oneloop_kernels.ops.packed_linear.plans import StreamPlan


def project_and_store(call: PackedCall, around: Surroundings) -> torch.Tensor | None:
    """See ops.rope.RopeOps.project_and_store. Where the plan cuts slices, and heads are not normed."""
    plan = plan_for(call.weight, call.x.shape[0], gated=False, may_split=call.tickets is not None)
    return None if plan is None or not takes(plan, call, around) else heads(plan, call, around).run()


def takes(plan: StreamPlan, call: PackedCall, around: Surroundings) -> bool:
    """Whether `heads` can do it by the plan."""
    alone = not call.gated and call.residual is None and around.norms is None
    return alone and plan.cuts_slices(call.weight, call.x.shape[0]) and fits(around) and may_stream(call)


def heads(plan: StreamPlan, call: PackedCall, around: Surroundings) -> Launch:
    """The call by one kernel, after one for the norm. → [n, heads, head_dim]."""
    num_tokens = call.x.shape[0]
    plan = fitting(plan, call.weight, num_tokens, gated=True)  # both halves of a head at once
    launch = slices(plan, prepared(call), around)
    return replace(launch, out=launch.out.view(num_tokens, -1, around.cache.shape[3]))
