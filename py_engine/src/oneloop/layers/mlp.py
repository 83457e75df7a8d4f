"""The gated feed-forward block (SwiGLU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.layers.limits import MLP_TOKENS_AT_ONCE
from oneloop.layers.linear import Linear

if TYPE_CHECKING:
    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.layers.norm import RMSNorm
    from oneloop.quant.base import Target


class GatedMLP:
    """x + down(silu(gate(norm(x))) · up(norm(x))), with gate and up in one weight."""

    __slots__ = ("_in_parts", "down", "gate_up")

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationSpec | GgufQuantization | None = None,
    ) -> None:
        """name: checkpoint name prefix."""
        halves = {f"{name}.gate_proj": intermediate_size, f"{name}.up_proj": intermediate_size}
        self.gate_up = Linear(
            hidden_size, halves, bias=bias, dtype=dtype, device=device, quantization=quantization
        )
        self.down = Linear(
            intermediate_size,
            {f"{name}.down_proj": hidden_size},
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        self._in_parts = device.type == "cpu"

    def __call__(self, x: torch.Tensor, *, norm: RMSNorm) -> None:
        """x += mlp(norm(x)), in place. x: [num_tokens, hidden_size] contiguous."""
        if not self._in_parts or x.shape[0] <= MLP_TOKENS_AT_ONCE:
            self._add(x, norm)
            return
        for first in range(0, x.shape[0], MLP_TOKENS_AT_ONCE):
            self._add(x[first : first + MLP_TOKENS_AT_ONCE], norm)

    def _add(self, x: torch.Tensor, norm: RMSNorm) -> None:
        if self.gate_up.leaves_gate(x):
            self.down.of_gate(self.gate_up(x, norm=norm), residual=x)
        else:
            self.down(self.gate_up(x, norm=norm, gated=True), residual=x)

    def output(self, x: torch.Tensor, *, norm: RMSNorm) -> torch.Tensor:
        """mlp(norm(x)), [num_tokens, hidden_size] of any strides; x stays as it is. For few tokens, on a CPU."""
        return self.down(self.gate_up(x, norm=norm, gated=True))

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where it goes."""
        return self.gate_up.weight_targets() | self.down.weight_targets()
