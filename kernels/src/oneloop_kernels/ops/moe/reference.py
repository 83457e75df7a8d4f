"""Experts in plain torch: tokens sorted by expert, then one expert after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.linear.apart import Stages
from oneloop_kernels.ops.moe.weights import multiply
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    from oneloop_kernels.ops.moe import Experts, MoeCall

_STAGES: Final = Stages(rms_norm, F.linear, silu_mul)


class Routing(NamedTuple):
    """ids: [num_tokens, top_k] int64, the likelier first. weights: [num_tokens, top_k] float32. shared:
    [num_tokens, 1] float32, the shared expert's factor, where there is one."""

    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None


def moe(call: MoeCall) -> None:
    """See ops.moe.Moe."""
    moe_apart(call, _STAGES)


def route(hidden: torch.Tensor, experts: Experts) -> Routing:
    """hidden: [num_tokens, hidden], behind the norm."""
    logits = F.linear(hidden.float(), experts.router.float())
    scores = logits[:, : experts.num_experts].softmax(-1)
    # A stable sort, for topk may give equals in any order.
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    weights = scores.gather(1, ids)
    if experts.renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    shared = logits[:, experts.num_experts :].sigmoid() if experts.has_shared_gate else None
    return Routing(ids, weights, shared)


def moe_apart(call: MoeCall, stages: Stages) -> None:
    """The contract, with the products and activations given."""
    experts, num_live = call.experts, call.x.shape[0]
    if call.slots is not None:
        num_live = int((call.slots >= 0).sum())  # padding comes last
    x = call.x[:num_live]
    hidden = stages.rms_norm(x, call.norm.weight, call.norm.eps)
    routing = route(hidden, experts)
    order = routing.ids.flatten().argsort(stable=True)
    counts = routing.ids.flatten().bincount(minlength=experts.num_experts)
    if call.statistics is not None:
        call.statistics.add_(counts)
    outputs = torch.empty(order.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        pairs = order[first : first + count]
        rows = hidden[pairs // experts.top_k]
        inner = stages.silu_mul(multiply(rows, experts.gate_up, expert, stages.product))
        outputs[pairs] = multiply(inner, experts.down, expert, stages.product)
        first += count
    outputs = outputs.view(num_live, experts.top_k, x.shape[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(experts.top_k):
        total.addcmul_(outputs[:, place].float(), routing.weights[:, place, None])
    if call.shared is not None:
        shared = call.shared[:num_live].float()
        total += shared if routing.shared is None else routing.shared * shared
    x += total.to(x.dtype)
