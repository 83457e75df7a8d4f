"""y = x · Wᵀ + b of 8-bit floats (e4m3), with what stands before and after it in a decoder layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear import LinearCall

BLOCK: Final = 128
"""Inputs that share a scale, where weights are scaled by blocks."""

LEAST_GENERATION: Final = 9
"""Compute capability (major) from which a GPU has kernels for it: where tensor cores take e4m3. 8.9's do too, but it is
not told from 8.0 here.
"""


class Fp8Linear(Protocol):
    """A linear map whose weight has 8 bits, and what is multiplied with it too."""

    def __call__(self, call: LinearCall, scales: torch.Tensor, *, of_gate: bool = False) -> torch.Tensor:
        """As ops.linear.Linear, but that call.weight is e4m3, [out, in], its rows contiguous.

        scales: float32, factors of the weight: [out], one per row; the input is then quantised per token. Or
        [out / n, ⌈in / BLOCK⌉], one per n × BLOCK elements; the input is quantised per BLOCK elements of a token.
        A scale of the input is the largest magnitude / 448. of_gate: call.x is [gate | up], 2 · in columns, and the
        input silu(gate) · up; there is no norm then.
        """

    def leaves_gate(self, call: LinearCall, scales: torch.Tensor) -> bool:
        """Whether a gated call is done sooner without its gate, if that is left to the map that follows (of_gate)."""


FP8_LINEAR: Family[Fp8Linear] = Family(
    "fp8_linear",
    (
        Implementation("triton", "oneloop_kernels.ops.fp8_linear.gpu", "linear", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.fp8_linear.reference", "linear"),
    ),
)
