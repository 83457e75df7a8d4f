"""The gated activation of SwiGLU (Shazeer, 2020): silu(gate) · up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class SiluMul(Protocol):
    """silu(gate) · up, where gate and up are the halves of the last dimension."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [num_tokens, 2 · size], any strides, overwritten. Returns a new contiguous [num_tokens, size]."""


SILU_MUL: Family[SiluMul] = Family(
    "silu_mul",
    (
        Implementation("triton", "oneloop_kernels.ops.silu_mul.triton", "silu_mul", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.silu_mul.reference", "silu_mul"),
    ),
)
