"""The tolerance table can fail."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.testing import TOLERANCES, assert_as_accurate, assert_close

KINDS = sorted(TOLERANCES)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_error_beyond_the_tolerance_fails_at_any_magnitude(dtype, kind):
    generator = torch.Generator().manual_seed(0)
    for magnitude in (1e-3, 1.0, 1e3):
        expected = torch.randn(5, 64, generator=generator).double() * magnitude
        allowed = TOLERANCES[kind].allowed(expected, dtype).expand_as(expected)
        assert_close(expected + 0.99 * allowed, expected, dtype, kind=kind)
        wrong = expected.clone()
        wrong[2, 17] -= 1.01 * allowed[2, 17]
        with pytest.raises(AssertionError, match=r"element \(2, 17\).* 1 of 320"):
            assert_close(wrong, expected, dtype, kind=kind)


def test_rows_are_measured_by_their_own_size():
    expected = torch.randn(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected[1] *= 1e-3
    wrong = expected.clone()
    wrong[1] += 1e-3
    assert_close(wrong, expected, torch.bfloat16, kind="layer")
    with pytest.raises(AssertionError, match="64 of 128"):
        assert_close(wrong, expected, torch.bfloat16, kind="attention")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_to_the_type_passes_and_to_a_coarser_one_fails(dtype, kind):
    """Coarser by three bits, for a single map; where several follow each other one more is allowed."""
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(expected.to(dtype), expected, kind=kind)
    bits = 9 if dtype is torch.float32 else 4 + (kind == "layer" or "gated" in kind)
    mantissa, exponent = torch.frexp(expected)
    step = torch.finfo(dtype).eps * 2.0**bits
    with pytest.raises(AssertionError, match="times the tolerance"):
        assert_close(torch.ldexp((mantissa / step).round() * step, exponent), expected, dtype, kind=kind)


def test_nan_infinity_zero_and_shape_are_errors():
    ones = torch.ones(4)
    for bad in (float("nan"), float("inf"), 0.0):
        with pytest.raises(AssertionError, match="element"):
            assert_close(torch.tensor([1.0, 1.0, bad, 1.0]), ones)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(4, 1), ones)
    assert_close(torch.zeros(3), torch.zeros(3))
    assert_close(torch.tensor(1.0), torch.tensor(1.0), kind="attention")


def test_as_accurate_as_plain_torch():
    """Neither more errors in sum nor one that is larger; NaN fails."""
    generator = torch.Generator().manual_seed(6)
    expected = torch.randn(64, 64, generator=generator)
    plain = (expected + 0.01 * torch.randn(64, 64, generator=generator)).bfloat16()
    assert_as_accurate(plain, plain, expected)
    assert_as_accurate(expected.bfloat16(), plain, expected)
    with pytest.raises(AssertionError, match="root mean square of errors is 1"):
        assert_as_accurate((expected + 1.3 * (plain.float() - expected)).bfloat16(), plain, expected)
    for bad, measure in ((0.1, "largest error"), (-0.1, "largest error"), (float("nan"), "root mean square")):
        one_off = plain.clone()
        one_off[3, 5] += bad
        with pytest.raises(AssertionError, match=rf"the {measure}.* is \S+ times that of plain torch"):
            assert_as_accurate(one_off, plain, expected)


def test_what_is_compared_for_accuracy_is_comparable():
    values = torch.rand(4, 4, generator=torch.Generator().manual_seed(7))
    plain = values.bfloat16()
    for bad in ((plain, plain[:1], values), (plain[0], plain, values), (plain, plain, values[:1])):
        with pytest.raises(AssertionError):
            assert_as_accurate(*bad)
    for bad in ((plain.float(), plain, values), (plain, plain, plain), (values, values, values)):
        with pytest.raises(AssertionError):
            assert_as_accurate(*bad)
