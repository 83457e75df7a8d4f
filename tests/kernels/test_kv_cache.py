"""Block copies over all layers."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.kv_cache import KV_CACHE
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

IMPLEMENTATIONS = ["reference", "triton"]


@pytest.mark.parametrize("by_head", [False, True], ids=["by-position", "by-head"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [None, 0, 1, 3])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_copies_go_where_they_should_and_nowhere_else(
    inputs, kernel_device, kernel_dtype, name, count, index_dtype, by_head
):
    cache = inputs.normal(2, 9, 4, 6, 24, dtype=kernel_dtype)
    if by_head:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    before = cache.clone()
    blocks = inputs.permutation(9)
    source, target = blocks[[0, 1, 0, 2]].to(index_dtype), blocks[3:7].to(index_dtype)
    counter = None
    if count is not None:  # an entry of a longer tensor, as the step's header is
        counter = torch.full((5,), 99, dtype=torch.int64, device=kernel_device)[2:3].fill_(count)
        source[count:], target[count:] = 2**31 - 1, 2**31 - 1
    KV_CACHE.resolve(kernel_device, kernel_dtype, name=name).copy_blocks(cache, source, target, counter)
    expected, num_copies = before.clone(), 4 if count is None else count
    for i in range(num_copies):
        expected[:, int(target[i])] = before[:, int(source[i])]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("pieces", [(256, 1), (4096, 3), (1 << 16, 1)])
def test_every_division_of_the_work(inputs, kernel_device, kernel_dtype, pieces):
    piece_bytes, programs_per_sm = pieces
    cache = inputs.normal(3, 40, 16, 2, 16, dtype=kernel_dtype)
    before = cache.clone()
    blocks = inputs.permutation(40).to(torch.int32)
    ops = KV_CACHE.resolve(kernel_device, kernel_dtype, name="triton")
    ops.copy_blocks(cache, blocks[:20], blocks[20:], piece_bytes=piece_bytes, programs_per_sm=programs_per_sm)
    assert torch.equal(cache[:, blocks[20:].long()], before[:, blocks[:20].long()])
    assert torch.equal(cache[:, blocks[:20].long()], before[:, blocks[:20].long()])


def test_no_copies(inputs, kernel_device, kernel_dtype):
    cache = inputs.normal(2, 3, 4, 2, 16, dtype=kernel_dtype)
    before, nothing = cache.clone(), torch.zeros(0, dtype=torch.int32, device=kernel_device)
    KV_CACHE.resolve(kernel_device, kernel_dtype, name="triton").copy_blocks(cache, nothing, nothing)
    assert torch.equal(cache, before)


def test_a_cache_with_gaps_is_refused(inputs, kernel_device, kernel_dtype):
    cache = inputs.normal(2, 3, 4, 4, 16, dtype=kernel_dtype)[:, :, :, :2]
    one = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    with pytest.raises(ValueError, match="blocks of 128 elements lie 256 apart"):
        KV_CACHE.resolve(kernel_device, kernel_dtype, name="triton").copy_blocks(cache, one, one + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True], ids=["by-position", "by-head"])
def test_offsets_beyond_32_bits(inputs, by_head):
    """A cache of more than 2³² elements; the last layer and block are copied right."""
    cache = torch.empty(5, 40_000, 16, 16, 128, dtype=torch.bfloat16, device="cuda")
    if by_head:
        cache = cache.transpose(2, 3)
    cache[:, 39_000:] = inputs.normal(5, 1000, 16, 16, 128, dtype=torch.bfloat16)
    source = torch.tensor([39_999, 39_998], dtype=torch.int32, device="cuda")
    target = torch.tensor([0, 38_000], dtype=torch.int32, device="cuda")
    KV_CACHE.resolve(cache.device, cache.dtype, name="triton").copy_blocks(cache, source, target)
    assert torch.equal(cache[:, target.long()], cache[:, source.long()])


def test_compiled_for_hopper():
    signature = {"cache": "*bf16", "source": "*i32", "target": "*i32", "count": "*i64", "num_layers": "i32"}
    strides = {"layer_stride": "i64", "block_stride": "i32", "max_copies": "i32"}
    (report,) = compile_all_for_hopper(
        [
            KernelSpec(
                "oneloop_kernels.ops.kv_cache.triton",
                "copy_blocks_kernel",
                {**signature, **strides},
                {"BLOCK_ELEMENTS": 16 * 16 * 128, "PIECE": 4096, "HAS_COUNT": True, "USE_PDL": True},
                {"num_warps": 4, "launch_pdl": True},
                unaligned=("max_copies", "count", "num_layers"),
            )
        ]
    )
    assert report.spilled == 0
    assert report.count(r"LDG\.E\.128") >= 4
    assert report.count(r"STG\.E\.128") >= 4
