"""A mixture of experts with what stands around it in a decoder layer: norm, routing, shared expert, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import Norm
    from oneloop_kernels.ops.moe.weights import ExpertWeight


class Experts(NamedTuple):
    """The weights of one layer's experts, and how tokens are sent to them. One device, all contiguous; the router, and
    plain weights, of x's dtype."""

    router: torch.Tensor
    """[num_experts, hidden], or [num_experts + 1, hidden]: the last row is then the gate of the shared expert."""
    gate_up: ExpertWeight
    """[num_experts, 2 · width, hidden]: rows of the gate, then of up."""
    down: ExpertWeight
    """[num_experts, hidden, width]. It may be kept in another way than gate_up."""
    top_k: int
    """Experts of a token, 1 … num_experts."""
    renormalised: bool
    """The weights of the chosen experts are divided by their sum (which is the softmax over the chosen alone)."""

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        """Of an expert's inner activations."""
        return self.down.shape[2]

    @property
    def has_shared_gate(self) -> bool:
        return self.router.shape[0] > self.num_experts


class MoeCall(NamedTuple):
    """One use of a layer's experts."""

    x: torch.Tensor
    """[num_tokens, hidden], contiguous: the residual stream, updated in place."""
    experts: Experts
    norm: Norm
    """x is RMS-normalised before the router and the experts."""
    counters: torch.Tensor
    """[num_counters(num_experts)] int32 zeros, left zero, that no two calls use at a time (say, one per layer)."""
    slots: torch.Tensor | None = None
    """[≤ num_tokens] int64: tokens with a negative entry, or none, are padding. They are sent to no expert, so that no
    weights are read for them, and their rows stay as they are. None: there is no padding."""
    shared: torch.Tensor | None = None
    """[num_tokens, hidden], any strides: the shared expert's output for norm(x). It is added too, multiplied by
    sigmoid(norm(x) · gate) where the router has that row."""
    statistics: torch.Tensor | None = None
    """[num_experts] int64: how many tokens were sent to each is added to it."""


class Moe(Protocol):
    """Sparse feed-forward (Shazeer et al., 2017) with softmax routing as in Mixtral, Qwen2-MoE and Qwen3-MoE."""

    def __call__(self, call: MoeCall) -> None:
        """x[t] += Σ over the top_k experts e of weight(t, e) · down_e(silu(gate_e(h)) · up_e(h)), h = norm(x[t]).

        Maps in e4m3 quantise what they are given, h or the product with the gate in x's type, as ops.fp8_linear does.

        weight: softmax over all experts of router · h, in float32. Of equal logits the lower index is chosen. The sum
        runs in an order that depends on the token's own experts alone, whatever else is in the batch.
        """


def num_counters(num_experts: int) -> int:
    """Elements of `MoeCall.counters`: tokens of each expert, and tickets."""
    return num_experts + NUM_TICKETS


NUM_TICKETS = 64
"""One for the launch, and one for each token of a small batch."""

MOE: Family[Moe] = Family(
    "moe",
    (
        Implementation("triton", "oneloop_kernels.ops.moe.gpu", "moe", frozenset({"cuda"})),
        Implementation(
            "cpu", "oneloop_kernels.ops.moe.cpu", "moe", frozenset({"cpu"}), frozenset({"float32"})
        ),
        Implementation("reference", "oneloop_kernels.ops.moe.reference", "moe"),
    ),
)
