"""The Triton norm against the formula in double precision: any strides, any number of rows, with the residual."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.launch import num_sms
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.testing import assert_close

EPS = 1e-5


def expected_norm(x, weight):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.fixture
def rms_norm(kernel_device, kernel_dtype):
    return RMS_NORM.resolve(kernel_device, kernel_dtype, name="triton")


@pytest.mark.parametrize(
    "shape", [(1, 64), (5, 100), (37, 24), (3, 2049), (3, 5, 24), (2, 3, 4, 128), (9,), (0, 64)]
)
def test_of_contiguous_tensors(rms_norm, inputs, kernel_dtype, shape):
    x = inputs.normal(*shape, dtype=kernel_dtype) * 3
    weight = inputs.normal(shape[-1], dtype=kernel_dtype)
    before = x.clone()
    out = rms_norm(x, weight, EPS)
    assert_close(out, expected_norm(x, weight), kind="elementwise") if x.numel() else None
    assert out.shape == x.shape
    assert out.is_contiguous()
    assert torch.equal(x, before)


def test_of_heads_inside_wider_rows_and_of_transposed_rows(rms_norm, inputs, kernel_dtype):
    heads = inputs.normal(7, 6, 24, dtype=kernel_dtype)[:, 1:4]
    weight = inputs.normal(24, dtype=kernel_dtype)
    assert_close(rms_norm(heads, weight, EPS), expected_norm(heads, weight), kind="elementwise")
    transposed = inputs.normal(24, 7, dtype=kernel_dtype).t()
    assert_close(rms_norm(transposed, weight, EPS), expected_norm(transposed, weight), kind="elementwise")


@pytest.mark.parametrize("shape", [(1, 64), (21, 100), (4, 3, 24)])
def test_with_a_residual(rms_norm, inputs, kernel_dtype, shape):
    """The sum is written to the residual as rounded, and that is what is normalised."""
    x, weight = inputs.normal(*shape, dtype=kernel_dtype), inputs.normal(shape[-1], dtype=kernel_dtype)
    wider = inputs.normal(*shape[:-1], 2 * shape[-1], dtype=kernel_dtype)
    beside = wider[..., shape[-1] :].clone()
    residual = wider[..., : shape[-1]]
    total = residual + x
    before = x.clone()
    out = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, total)
    assert_close(out, expected_norm(total, weight), kind="elementwise")
    assert torch.equal(wider[..., shape[-1] :], beside)
    assert torch.equal(x, before)


def test_the_reference_takes_a_residual_too(kernel_device, inputs, kernel_dtype):
    x, residual = inputs.normal(5, 48, dtype=kernel_dtype), inputs.normal(5, 48, dtype=kernel_dtype)
    weight, total = inputs.normal(48, dtype=kernel_dtype), residual + x
    out = RMS_NORM.resolve(kernel_device, kernel_dtype, name="reference")(x, weight, EPS, residual=residual)
    assert torch.equal(residual, total)
    assert_close(out, expected_norm(total, weight), kind="elementwise")


def test_large_and_tiny_values(rms_norm, inputs, kernel_dtype):
    """Squares beyond float16's range, and rows so small that eps decides."""
    weight = inputs.normal(64, dtype=kernel_dtype)
    for factor in (3000.0, 1e-4, 0.0):
        x = inputs.normal(3, 64, dtype=kernel_dtype) * factor
        assert_close(rms_norm(x, weight, EPS), expected_norm(x, weight), kind="elementwise")


def test_rows_are_taken_together_only_where_no_multiprocessor_goes_without():
    from oneloop_kernels.ops.rms_norm.triton import rows_of_a_program

    assert [rows_of_a_program(n, 1024, 132) for n in (1, 64, 263, 264, 512, 9999)] == [1, 1, 1, 2, 2, 2]
    assert [rows_of_a_program(n, 128, 132) for n in (64, 300, 1000, 2112, 99999)] == [1, 2, 4, 16, 16]
    assert rows_of_a_program(99999, 4096, 132) == 1


def test_short_rows_with_a_residual_get_a_warp_each_where_there_are_many():
    from oneloop_kernels.ops.rms_norm.triton import program_shape

    assert program_shape(4096, 1024, 132, has_residual=True) == (8, 8)
    assert program_shape(3000, 1024, 132, has_residual=True) == (2, 4)
    assert program_shape(4096, 1024, 132, has_residual=False) == (2, 4)
    assert program_shape(4096, 4096, 132, has_residual=True) == (1, 8)
    assert program_shape(1, 1024, 132, has_residual=True) == (1, 4)


def test_many_rows_with_a_residual(rms_norm, inputs, kernel_dtype):
    """More than come together in a program, the last of which is not full."""
    num_rows = 3 * num_sms(inputs.device) * 8 + 5
    x, residual = (
        inputs.normal(num_rows, 40, dtype=kernel_dtype),
        inputs.normal(num_rows, 40, dtype=kernel_dtype),
    )
    weight, total = inputs.normal(40, dtype=kernel_dtype), residual + x
    out = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, total)
    assert_close(out, expected_norm(total, weight), kind="elementwise")
