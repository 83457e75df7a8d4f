"""Rows of the embedding table, which come with the angles of a step."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.rope import ROPE


def lookup(name, token_ids, table):
    """The rows, by the implementation of that name on the table's device."""
    device = table.device
    angles = ROPE.resolve(device, table.dtype, name=name).angles(
        torch.ones(8, device=device), 1.0, table.dtype
    )
    positions = torch.zeros(len(token_ids), dtype=torch.int32, device=device)
    return angles.with_embedding(positions, token_ids, table)[1]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [16, 1024, 1500])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_rows(inputs, kernel_device, kernel_dtype, name, size, id_dtype):
    weight = inputs.normal(37, size, dtype=kernel_dtype)
    token_ids = inputs.integers(0, 37, 11, dtype=id_dtype)
    token_ids[3], token_ids[4] = 36, 0
    out = lookup(name, token_ids, weight)
    assert torch.equal(out, weight[token_ids.long()])
    assert out.is_contiguous()


def test_no_tokens_and_a_table_within_a_wider_one(inputs, kernel_device, kernel_dtype):
    weight = inputs.normal(8, 64, dtype=kernel_dtype)[:, :32]
    token_ids = torch.tensor([7, 2], dtype=torch.int32, device=kernel_device)
    assert torch.equal(lookup("triton", token_ids, weight), weight[[7, 2]])
    assert lookup("triton", token_ids[:0], weight).shape == (0, 32)


def test_ids_out_of_range_read_nothing_outside(inputs, kernel_device, kernel_dtype):
    """The table lies between rows of NaN, which nobody may read."""
    around = inputs.poisoned(12, 64, dtype=kernel_dtype)
    weight = around[4:8]
    weight.copy_(inputs.normal(4, 64, dtype=kernel_dtype))
    token_ids = torch.tensor([-1, 4, 5, -3, 2**40, -(2**40), 1], device=kernel_device)
    out = lookup("triton", token_ids, weight)
    assert torch.equal(out, weight[[0, 3, 3, 0, 3, 0, 1]])
    with pytest.raises(IndexError):
        lookup("reference", token_ids.cpu(), weight.cpu())
