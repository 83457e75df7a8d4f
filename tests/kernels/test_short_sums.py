"""The law of sums of 8-bit products: of the emulated tensor cores here, bit by bit of those of Hopper on a GPU."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.fp8_linear.quantize import quantize_rows
from oneloop_kernels.testing.short_sums import allowance, emulated


def operands(num_rows, out_size, in_size, *, heavy, device="cpu"):
    """heavy: a few columns prevail, as those of a model's activations do."""
    generator = torch.Generator().manual_seed(in_size)
    x = torch.randn(num_rows, in_size, generator=generator)
    weight = torch.randn(out_size, in_size, generator=generator)
    if heavy:
        x *= torch.randn(1, in_size, generator=generator).abs().pow(3)
        weight *= torch.randn(out_size, in_size, generator=generator).abs()
    return quantize_rows(x.to(device))[0], quantize_rows(weight.to(device))[0]


@pytest.mark.parametrize("piece", [None, 128, 512])
@pytest.mark.parametrize("in_size", [256, 1024, 4096])
@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy"])
def test_emulated_sums_are_within_the_law_and_near_it(in_size, piece, heavy):
    x, weight = operands(32, 128, in_size, heavy=heavy)
    exact = x.double() @ weight.double().t()
    allowed = allowance(exact, in_size, piece)
    shares = (emulated(x, weight, piece) - exact).abs() / allowed
    assert shares.max() < 1
    assert shares.max() > 0.15  # 4,096 sums: a bound many times as large would find no fault


def test_one_instruction():
    """Products keep 13 bits behind the first of the largest, whatever their sign, and lose the rest."""
    x, weight = torch.zeros(2, 1, 32)
    x[0, :3] = torch.tensor([256.0, 1.125, -1.125])
    weight[0, :3] = torch.tensor([256.0, 8.0, 1.0])
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    assert emulated(x, weight).item() == 65536 + 8 - 0  # 9 and -1.125 in multiples of 2^16 / 2^13 = 8
