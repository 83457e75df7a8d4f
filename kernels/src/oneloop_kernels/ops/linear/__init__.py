"""y = x · Wᵀ + b, with what stands before and after it in a decoder layer: norm, gate, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from oneloop_kernels.padding import padded_num_tokens as padded_num_tokens
from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch

NUM_TICKETS: Final = 2048
"""Elements of `tickets`."""


class Norm(NamedTuple):
    """RMS normalisation of a linear map's input; see ops.rms_norm."""

    weight: torch.Tensor
    """[in], the input's dtype."""
    eps: float


class LinearCall(NamedTuple):
    """One use of a linear map: norm(x) · weightᵀ + bias, then the gate, then the residual. One dtype, one device."""

    x: torch.Tensor
    """[num_tokens, in], rows contiguous. Never overwritten."""
    weight: torch.Tensor
    """[out, in], either dimension contiguous."""
    bias: torch.Tensor | None = None
    """[out]."""
    norm: Norm | None = None
    """x is RMS-normalised first."""
    gated: bool = False
    """The rows of weight (and bias) are [gate; up]; the result is silu(gate) · up, [num_tokens, out / 2]."""
    residual: torch.Tensor | None = None
    """[num_tokens, out], rows contiguous: the result is added into it, and it is returned."""
    tickets: torch.Tensor | None = None
    """[NUM_TICKETS] int32 zeros on the device, left zero, that no two launches use at a time (say, one per weight):
    with them an implementation may split sums among programs that then settle who adds up. Without them the result is
    the same, perhaps later."""

    @property
    def out_size(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]


class Linear(Protocol):
    """A linear map with what surrounds it."""

    def __call__(self, call: LinearCall) -> torch.Tensor:
        """Returns the residual or a new [num_tokens, out or out / 2] of any strides: on the CPU the transposed product
        is the faster one, and what follows reads it through its strides.

        Sums run in float32. What lies between the stages (the normalised input, gate and up) may be rounded to the
        dtype or not.
        """


LINEAR: Family[Linear] = Family(
    "linear",
    (
        Implementation("triton", "oneloop_kernels.ops.linear.gpu", "linear", frozenset({"cuda"})),
        Implementation(
            "cpu", "oneloop_kernels.ops.linear.cpu", "linear", frozenset({"cpu"}), frozenset({"float32"})
        ),
        Implementation("reference", "oneloop_kernels.ops.linear.reference", "linear"),
    ),
)
