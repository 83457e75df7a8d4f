"""What stands around the product of 8 bits where cuBLAS computes it; here another product stands for that of a GPU."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.fp8_linear import gpu
from oneloop_kernels.ops.fp8_linear.quantize import dequantized, quantize_rows
from oneloop_kernels.ops.linear import LinearCall
from oneloop_kernels.ops.linear.launches import Scales
from oneloop_kernels.ops.silu_mul.reference import silu_mul


def product(x: torch.Tensor, weight: torch.Tensor, scales: Scales, bias: torch.Tensor | None) -> torch.Tensor:
    out = dequantized(x, scales.x) @ dequantized(weight, scales.weight).t()
    return out if bias is None else out + bias


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gate_and_residual(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device, gated: bool, with_residual: bool
) -> None:
    monkeypatch.setattr(gpu, "product", product)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kernel_device)

    (x, x_scales), (weight, scales) = quantize_rows(normal(70, 96)), quantize_rows(normal(64, 96))
    bias, residual = normal(64), normal(70, 32 if gated else 64) if with_residual else None
    factors = Scales(x_scales, scales, torch.float32)
    wanted = product(x, weight, factors, bias)
    wanted = silu_mul(wanted) if gated else wanted
    wanted = wanted if residual is None else wanted + residual
    found = gpu.many_rows(LinearCall(x, weight, bias, gated=gated, residual=residual), factors)
    assert residual is None or found.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
