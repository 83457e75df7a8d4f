"""The linear map of 8-bit floats in plain torch: quantised input and weight are widened to float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop_kernels.ops.fp8_linear.quantize import dequantized, quantize_blocks, quantize_rows
from oneloop_kernels.ops.linear.apart import Stages, linear_apart
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.linear import LinearCall


class ReferenceLinear:
    """See ops.fp8_linear.Fp8Linear."""

    def __call__(self, call: LinearCall, scales: torch.Tensor, *, of_gate: bool = False) -> torch.Tensor:
        """See Fp8Linear."""

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            quantized = quantize_rows(x) if scales.dim() == 1 else quantize_blocks(x)
            out = dequantized(*quantized) @ dequantized(weight, scales).t()
            return (out if bias is None else out + bias.float()).to(x.dtype)

        if of_gate:
            call = call._replace(x=silu_mul(call.x))
        return linear_apart(call, Stages(rms_norm, product, silu_mul))

    def leaves_gate(self, call: LinearCall, scales: torch.Tensor) -> bool:
        """See Fp8Linear."""
        return False


linear: Final = ReferenceLinear()
