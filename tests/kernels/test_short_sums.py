"""The law of sums of 8-bit products: of the emulated tensor cores here, bit by bit of those of Hopper on a GPU."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.fp8_linear.quantize import quantize_rows
from oneloop_kernels.ops.fp8_linear.triton.tiles import tiles
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall
from oneloop_kernels.ops.linear.launches import Scales, dense, stream
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan, can_stream
from oneloop_kernels.testing.short_sums import allowance, emulated

WAYS = {
    "dense": lambda call, scales: dense(DensePlan((32,), 4), call, scales).run(),
    "stream": lambda call, scales: stream(StreamPlan(64, 256, 3, whole=True), call, scales).run(),
    "tiles": lambda call, scales: tiles(call, scales),
    "cuBLAS": lambda call, scales: torch._scaled_mm(
        call.x,
        call.weight.t(),
        *(torch.ones((), device=call.x.device) for _ in range(2)),
        out_dtype=torch.float32,
        use_fast_accum=True,
    ),
}


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


@pytest.mark.gpu
@pytest.mark.parametrize("in_size", [32, 160, 1024])
@pytest.mark.parametrize("way", WAYS)
def test_hopper_adds_as_emulated(way, in_size):
    """Bit by bit."""
    device = torch.device("cuda")
    assert not INTERPRETED
    assert can_stream(device)
    x, weight = operands(48, 64, in_size, heavy=False, device=device)
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
    scales = Scales(torch.ones(48, device=device), torch.ones(64, device=device), torch.float32)
    out = WAYS[way](LinearCall(x, weight, tickets=tickets), scales)
    assert out.dtype == torch.float32
    assert torch.equal(out.double(), emulated(x, weight))
