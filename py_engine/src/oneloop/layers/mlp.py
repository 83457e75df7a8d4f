"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.layers.linear import Linear
from oneloop_kernels.ops.silu_mul import SILU_MUL

if TYPE_CHECKING:
    import torch


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
        return self.down(self._activate(self.gate_up(x)))

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the view that it fills."""
        return self.gate_up.weight_targets() | self.down.weight_targets()
