"""Rows of the embedding table."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.embedding import EMBEDDING
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [16, 1024, 1500])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_rows(inputs, kernel_device, kernel_dtype, name, size, id_dtype):
    weight = inputs.normal(37, size, dtype=kernel_dtype)
    token_ids = inputs.integers(0, 37, 11, dtype=id_dtype)
    token_ids[3], token_ids[4] = 36, 0
    out = EMBEDDING.resolve(kernel_device, kernel_dtype, name=name)(token_ids, weight)
    assert torch.equal(out, weight[token_ids.long()])
    assert out.is_contiguous()


def test_no_tokens_and_a_table_within_a_wider_one(inputs, kernel_device, kernel_dtype):
    weight = inputs.normal(8, 64, dtype=kernel_dtype)[:, :32]
    compute = EMBEDDING.resolve(kernel_device, kernel_dtype, name="triton")
    token_ids = torch.tensor([7, 2], dtype=torch.int32, device=kernel_device)
    assert torch.equal(compute(token_ids, weight), weight[[7, 2]])
    assert compute(token_ids[:0], weight).shape == (0, 32)


def test_ids_out_of_range_read_nothing_outside(inputs, kernel_device, kernel_dtype):
    """The table lies between rows of NaN, which nobody may read."""
    around = inputs.poisoned(12, 64, dtype=kernel_dtype)
    weight = around[4:8]
    weight.copy_(inputs.normal(4, 64, dtype=kernel_dtype))
    token_ids = torch.tensor([-1, 4, 5, -3, 2**40, -(2**40), 1], device=kernel_device)
    out = EMBEDDING.resolve(kernel_device, kernel_dtype, name="triton")(token_ids, weight)
    assert torch.equal(out, weight[[0, 3, 3, 0, 3, 0, 1]])
    reference = EMBEDDING.resolve(torch.device("cpu"), kernel_dtype, name="reference")
    with pytest.raises(IndexError):
        reference(token_ids.cpu(), weight.cpu())


def test_compiled_for_hopper():
    signature = {"token_ids": "*i32", "weight": "*bf16", "out": "*bf16"}
    numbers = {"vocab_size": "i32", "row_stride": "i32", "size": "i32"}
    (report,) = compile_all_for_hopper(
        [
            KernelSpec(
                "oneloop_kernels.ops.embedding.triton",
                "embedding_kernel",
                signature | numbers,
                {"PIECE": 1024, "USE_PDL": True},
                {"num_warps": 4, "launch_pdl": True},
                unaligned=("vocab_size",),
            )
        ]
    )
    assert report.spilled == 0
    assert report.count(r"LDG\.E\.128") == 1
    assert report.count(r"STG\.E\.128") == 1
