"""RMS normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.linear import Norm
from oneloop_kernels.ops.rms_norm import RMS_NORM

if TYPE_CHECKING:
    from oneloop.quant.base import Target


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension: alone, or inside the linear map that follows.

    norm: what a linear map needs to apply it.
    """

    __slots__ = ("_compute", "_name", "norm", "weight")

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        """name: checkpoint name prefix."""
        self._name = name
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.norm = Norm(self.weight, eps)
        self._compute = RMS_NORM.resolve(device, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → new [..., size]."""
        return self._compute(x, self.weight, self.norm.eps)

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → the tensor that it fills."""
        return {f"{self._name}.weight": self.weight}
