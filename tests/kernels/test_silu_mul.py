"""The Triton activation against the formula in double precision."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.silu_mul import SILU_MUL
from oneloop_kernels.testing import assert_close


def expected_product(gate_up):
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


@pytest.fixture
def silu_mul(kernel_device, kernel_dtype):
    return SILU_MUL.resolve(kernel_device, kernel_dtype, name="triton")


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 33), (3, 2048), (2, 5001), (0, 64)])
def test_of_contiguous_rows(silu_mul, inputs, kernel_dtype, num_tokens, size):
    gate_up = inputs.normal(num_tokens, 2 * size, dtype=kernel_dtype) * 4
    expected = expected_product(gate_up)
    out = silu_mul(gate_up)
    assert out.shape == (num_tokens, size)
    assert out.is_contiguous()
    if num_tokens:
        assert_close(out, expected, kind="elementwise")


def test_of_any_strides(silu_mul, inputs, kernel_dtype):
    wide = inputs.normal(5, 200, dtype=kernel_dtype)
    for gate_up in (wide[:, 3:67], wide.t()[:64].t(), inputs.normal(64, 5, dtype=kernel_dtype).t()):
        expected = expected_product(gate_up)
        assert_close(silu_mul(gate_up), expected, kind="elementwise")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # by numpy, in the interpreter
def test_of_gates_far_from_zero(silu_mul, inputs, kernel_dtype):
    """exp overflows; the product does not."""
    gate_up = torch.cat(
        (inputs.normal(2, 32, dtype=kernel_dtype) * 200, inputs.normal(2, 32, dtype=kernel_dtype)), 1
    )
    expected = expected_product(gate_up)
    assert_close(silu_mul(gate_up), expected, kind="elementwise")
