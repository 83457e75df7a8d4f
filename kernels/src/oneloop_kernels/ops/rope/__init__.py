"""Rotary position embedding (Su et al., 2021) in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class Rope(Protocol):
    """x ← x · cos + (x with its halves exchanged) · sin, in place."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim] of the same dtype.

        sin carries the sign of the rotation: its first half is negated, so that exchanging halves is enough.
        """


ROPE: Family[Rope] = Family(
    "rope",
    (Implementation("reference", "oneloop_kernels.ops.rope.reference", "rope"),),
)
