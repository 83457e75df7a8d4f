"""Linear maps, one or several fused into one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.linear import LINEAR, NUM_TICKETS, LinearCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.layers.norm import RMSNorm


class Linear:
    """y = x · Wᵀ + b. Several maps of the same input may lie one below the other in W.

    weight: [sum of the parts' sizes, in_size], uninitialised until the loader fills it.
    """

    __slots__ = ("_compute", "_parts", "_tickets", "bias", "weight")

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
        self._tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
        self._compute = LINEAR.resolve(device, dtype)

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [num_tokens, in_size] contiguous → [num_tokens, out_size] of any strides.

        norm: applied to x first; x stays as it is. gated: the two parts are gate and up, and the result is
        silu(gate) · up, [num_tokens, out_size / 2]. residual: contiguous; the result is added into it, and it is
        returned.
        """
        return self._compute(self.call(x, norm=norm, gated=gated, residual=residual))

    def call(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
    ) -> LinearCall:
        """As __call__, for who computes it together with something else."""
        return LinearCall(
            x,
            self.weight,
            self.bias,
            norm=None if norm is None else norm.norm,
            gated=gated,
            residual=residual,
            tickets=self._tickets,
        )

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
