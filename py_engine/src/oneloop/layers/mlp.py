"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from typing import Final

import torch

from oneloop.layers.linear import Linear
from oneloop_kernels.ops.silu_mul import SILU_MUL

MAX_TOKENS_AT_ONCE: Final = 512
"""More are computed in parts: the widest activations of a model then stay small, and in the processor's cache."""


class GatedMLP:
    """down(silu(gate(x)) · up(x)), with gate and up in one weight."""

    __slots__ = ("_activate", "down", "gate_up")

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """name: checkpoint name prefix."""
        halves = {f"{name}.gate_proj": intermediate_size, f"{name}.up_proj": intermediate_size}
        self.gate_up = Linear(hidden_size, halves, bias=bias, dtype=dtype, device=device)
        self.down = Linear(
            intermediate_size, {f"{name}.down_proj": hidden_size}, bias=bias, dtype=dtype, device=device
        )
        self._activate = SILU_MUL.resolve(device, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] contiguous → the same shape, any strides."""
        if x.shape[0] <= MAX_TOKENS_AT_ONCE:
            return self.down(self._activate(self.gate_up(x)))
        out = torch.empty_like(x)
        for first in range(0, x.shape[0], MAX_TOKENS_AT_ONCE):
            part = slice(first, first + MAX_TOKENS_AT_ONCE)
            out[part] = self.down(self._activate(self.gate_up(x[part])))
        return out

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the view that it fills."""
        return self.gate_up.weight_targets() | self.down.weight_targets()
