"""y = x · Wᵀ + b."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class Linear(Protocol):
    """x · weightᵀ + bias."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [num_tokens, in] contiguous; weight: [out, in] contiguous; bias: [out] or None. One dtype, one device.

        Returns a new [num_tokens, out] of any strides: on the CPU the transposed product is the faster one, and
        what follows reads it through its strides.
        """


LINEAR: Family[Linear] = Family(
    "linear",
    (
        Implementation(
            "cpu", "oneloop_kernels.ops.linear.cpu", "linear", frozenset({"cpu"}), frozenset({"float32"})
        ),
        Implementation("reference", "oneloop_kernels.ops.linear.reference", "linear"),
    ),
)


def padded_num_tokens(num_tokens: int) -> int:
    """The number of rows to compute instead: 2, 4, or a multiple of 8 that grows to 64. Above 64 at most 13 % more.

    A single row is computed as two (see `cpu`); few distinct numbers keep oneDNN's kernels few.
    """
    if num_tokens <= 2:
        return 2
    if num_tokens <= 4:
        return 4
    multiple = 8
    while multiple < 64 and num_tokens > 16 * multiple:
        multiple *= 2
    return -(-num_tokens // multiple) * multiple
