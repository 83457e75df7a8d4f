"""Linear maps, one or several fused into one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.linear import LINEAR

if TYPE_CHECKING:
    from collections.abc import Mapping


class Linear:
    """y = x · Wᵀ + b. Several maps of the same input may lie one below the other in W.

    weight: [sum of the parts' sizes, in_size], uninitialised until the loader fills it.
    """

    __slots__ = ("_compute", "_parts", "bias", "weight")

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: torch.Tensor | None = None,
    ) -> None:
        """parts: checkpoint name prefix → output size, in order. weight: an existing one to share (a tied head)."""
        out_size = sum(parts.values())
        self._parts = dict(parts)
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device) if weight is None else weight
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._compute = LINEAR.resolve(device, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_size] contiguous → [num_tokens, out_size] of any strides."""
        return self._compute(x, self.weight, self.bias)

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the view that it fills."""
        targets = {}
        start = 0
        for name, size in self._parts.items():
            targets[f"{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                targets[f"{name}.bias"] = self.bias[start : start + size]
            start += size
        return targets
