"""The tolerance table can fail."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.testing import TOLERANCES, assert_close

DTYPES = sorted(TOLERANCES, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_error_of_twice_the_tolerance_fails_at_any_magnitude(dtype):
    generator = torch.Generator().manual_seed(0)
    for magnitude in (1e-3, 1.0, 1e3):
        expected = torch.randn(64, generator=generator).double() * magnitude
        assert_close(expected * (1 + TOLERANCES[dtype].relative * 0.9), expected, dtype)
        wrong = expected.clone()
        wrong[17] += 2.1 * TOLERANCES[dtype].relative * (expected[17].abs() + expected.square().mean().sqrt())
        with pytest.raises(AssertionError, match=r"element \(17,\)"):
            assert_close(wrong, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_to_the_type_passes_and_to_one_with_three_bits_less_fails(dtype):
    expected = torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(expected.to(dtype), expected)
    coarse = torch.finfo(dtype).eps * 2**9 if dtype is torch.float32 else torch.finfo(dtype).eps * 2**4
    rounded = (expected / coarse).round() * coarse
    with pytest.raises(AssertionError, match="times the tolerance"):
        assert_close(rounded, expected, dtype)


def test_nan_infinity_zero_and_shape_are_errors():
    ones = torch.ones(4)
    for bad in (float("nan"), float("inf"), 0.0):
        with pytest.raises(AssertionError, match="element"):
            assert_close(torch.tensor([1.0, 1.0, bad, 1.0]), ones)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(4, 1), ones)
    assert_close(torch.zeros(3), torch.zeros(3))
