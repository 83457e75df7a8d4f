"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class RmsNorm(Protocol):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., size], any strides; weight: [size], same dtype. Returns a new [..., size] of x's dtype.

        residual: x's shape and dtype, any strides: x is added into it first, and the sum is what is normalised.

        The mean and the quotient are computed in float32; the quotient is rounded to x's dtype before it is
        multiplied by the weight, as Hugging Face's Llama and Qwen do.
        """


RMS_NORM: Family[RmsNorm] = Family(
    "rms_norm",
    (
        Implementation("triton", "oneloop_kernels.ops.rms_norm.triton", "rms_norm", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.rms_norm.reference", "rms_norm"),
    ),
)
