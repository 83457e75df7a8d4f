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


class Linear(Protocol):
    """norm(x) · weightᵀ + bias, then the gate, then the residual."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        tickets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [num_tokens, in], rows contiguous; weight: [out, in], either dimension contiguous; bias: [out] or None.

        norm: x is RMS-normalised first. It is never overwritten.
        gated: the rows of weight (and bias) are [gate; up]; the result is silu(gate) · up, [num_tokens, out / 2].
        residual: [num_tokens, out], rows contiguous: the result is added into it, and it is returned.
        tickets: [NUM_TICKETS] int32 zeros on the device, left zero, that no two launches use at a time (say, one per
        weight): with them an implementation may split sums among programs and let the last one add up. Without them
        the result is the same, perhaps later.

        One dtype, one device. Sums run in float32. What lies between the stages (the normalised input, gate and up) may
        be rounded to the dtype or not. Returns residual or a new [num_tokens, out or out / 2] of any strides: on the
        CPU the transposed product is the faster one, and what follows reads it through its strides.
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
