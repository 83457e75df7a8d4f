"""Linear maps, norm and activation against the formulas in double precision."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.linear import LINEAR, LinearCall, padded_num_tokens
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.ops.silu_mul import SILU_MUL
from oneloop_kernels.testing import assert_close

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 16, 33, 191, 192, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LINEAR.candidates(CPU, torch.float32))
def test_linear_float32_at_every_way_it_is_computed(num_tokens, bias, name):
    x, weight = normal(num_tokens, 96), normal(160, 96, seed=1)
    offset = normal(160, seed=2) if bias else None
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0.0)
    before = x.clone()
    out = LINEAR.resolve(CPU, torch.float32, name=name)(LinearCall(x, weight, offset))
    assert_close(out, expected, kind="linear")
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_in_short_types(dtype):
    x, weight, bias = (
        normal(7, 96, dtype=dtype),
        normal(160, 96, dtype=dtype, seed=1),
        normal(160, dtype=dtype),
    )
    expected = x.double() @ weight.double().T + bias.double()
    assert_close(LINEAR.resolve(CPU, dtype)(LinearCall(x, weight, bias)), expected, dtype, kind="linear")


def test_padding_is_little_and_takes_few_values():
    padded = [padded_num_tokens(n) for n in range(1, 8193)]
    assert all(p >= n for n, p in enumerate(padded, 1))
    assert all(p <= n * 1.13 for n, p in enumerate(padded, 1) if n > 64)
    assert padded[:5] == [2, 2, 4, 4, 8]
    assert padded[4:64] == [(n + 7) // 8 * 8 for n in range(5, 65)]
    assert len(set(padded[:2048])) <= 58
    assert all(padded_num_tokens(p) == p for p in padded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 24)])
def test_rms_norm(dtype, shape):
    x, weight = normal(*shape, dtype=dtype) * 3, normal(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    compute = RMS_NORM.resolve(CPU, dtype)
    assert_close(compute(x, weight, 1e-5), expected, dtype, kind="elementwise")
    assert_close(compute(x.mT.contiguous().mT, weight, 1e-5), expected, dtype, kind="elementwise")


def test_rms_norm_in_float32_has_the_bits_of_the_long_way():
    x, weight = normal(40, 576), normal(576, seed=1)
    long_way = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert torch.equal(RMS_NORM.resolve(CPU, torch.float32)(x, weight, 1e-6), long_way)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_of_either_layout(dtype):
    gate_up = normal(7, 48, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    compute, second = SILU_MUL.resolve(CPU, dtype), gate_up.clone()
    assert_close(compute(gate_up), expected, dtype, kind="elementwise")
    transposed = compute(second.t().contiguous().t())
    assert_close(transposed, expected, dtype, kind="elementwise")
    assert transposed.is_contiguous()
