"""Linear maps, one or several fused into one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.quant.choose import stored_weight
from oneloop.quant.fp8 import Fp8Weight
from oneloop.quant.plain import PlainWeight
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall
from oneloop_kernels.ops.silu_mul import SILU_MUL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.layers.norm import RMSNorm
    from oneloop.quant.base import StoredWeight, Target
    from oneloop_kernels.ops.packed_linear import PackedCall


class Linear:
    """y = x · Wᵀ + b. Several maps of the same input may lie one below the other in W.

    stored: how W is kept, [sum of the parts' sizes, in_size], uninitialised until the loader fills it.
    """

    __slots__ = ("_parts", "_silu_mul", "_tickets", "bias", "stored")

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: QuantizationSpec | GgufQuantization | None = None,
        weight: torch.Tensor | None = None,
    ) -> None:
        """parts: checkpoint name prefix → output size, in order. weight: an existing one to share (a tied head)."""
        out_size = sum(parts.values())
        self._parts = dict(parts)
        self.stored: StoredWeight
        if weight is not None:
            self.stored = PlainWeight(parts, weight)
        else:
            self.stored = stored_weight(quantization, in_size, parts, dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._silu_mul = SILU_MUL.resolve(device, dtype)
        self._tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)

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
        return self.stored.multiply(self._call(x, norm, gated, residual))

    def leaves_gate(self, x: torch.Tensor) -> bool:
        """Whether the gated map of x is done sooner without its gate, left to the map that follows (`of_gate`)."""
        stored = self.stored
        return isinstance(stored, Fp8Weight) and stored.leaves_gate(
            self._call(x, None, gated=True, residual=None)
        )

    def of_gate(self, gate_up: torch.Tensor, *, residual: torch.Tensor) -> torch.Tensor:
        """As __call__ of silu(gate) · up. gate_up: [num_tokens, 2 · in_size] contiguous; it may be overwritten."""
        call = self._call(gate_up, None, gated=False, residual=residual)
        if isinstance(self.stored, Fp8Weight):
            return self.stored.multiply_gate(call)
        return self.stored.multiply(call._replace(x=self._silu_mul(gate_up)))

    def joint_call(self, x: torch.Tensor, *, norm: RMSNorm | None = None) -> LinearCall | PackedCall | None:
        """As __call__, for who computes it together with something else; None where W is kept in no way for that."""
        return self.stored.joint_call(self._call(x, norm, gated=False, residual=None))

    def _call(
        self, x: torch.Tensor, norm: RMSNorm | None, gated: bool, residual: torch.Tensor | None
    ) -> LinearCall:
        return LinearCall(
            x,
            self.stored.matrix,
            self.bias,
            norm=None if norm is None else norm.norm,
            gated=gated,
            residual=residual,
            tickets=self._tickets,
        )

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where it goes."""
        targets = self.stored.targets()
        if self.bias is not None:
            biases = torch.split(self.bias, list(self._parts.values()))
            targets |= {f"{name}.bias": bias for name, bias in zip(self._parts, biases, strict=True)}
        return targets
