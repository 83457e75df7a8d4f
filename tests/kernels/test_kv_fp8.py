"""Keys and values kept in 8 bits: written by the rotation, copied, read by every attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from oneloop_kernels.ops.float8 import FP8, FP8_MAX, to_float8
from oneloop_kernels.ops.float8.triton import as_float8
from oneloop_kernels.ops.kv_cache import KV_CACHE, UNSCALED, KvScales
from oneloop_kernels.ops.kv_cache.reference import narrowed
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, PAGED_ATTENTION, AttentionRows
from oneloop_kernels.ops.rope import ROPE, HeadNorms
from oneloop_kernels.testing import assert_close
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def every_neighbour() -> torch.Tensor:
    """All numbers of 8 bits, what lies midway between them, and what lies next to those."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    exact = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))
    beyond = torch.tensor([449.0, 1e30, torch.inf, -464.0, -torch.inf, torch.nan, 1e-30, -0.0])
    infinity = torch.tensor(torch.inf)
    return torch.cat((exact, exact.nextafter(infinity), exact.nextafter(-infinity), beyond))


@triton.jit
def convert_kernel(source, target, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(target + place, as_float8(tl.load(source + place)))


def test_kernels_round_as_torch_does(kernel_device):
    source = torch.zeros(2048)
    values = every_neighbour()
    source[: len(values)] = values
    target = torch.zeros(2048, dtype=FP8, device=kernel_device)
    convert_kernel[(1,)](source.to(kernel_device), target, size=2048)
    expected = to_float8(source)
    known = ~expected.float().isnan()
    assert torch.equal(bits(target.cpu())[known], bits(expected)[known])
    assert bool(target.cpu().float()[~known].isnan().all())


def test_what_is_kept():
    """Rounded to nearest even; what is too large is the largest; NaN stays NaN."""
    values = torch.tensor([0.0, 1.0, 17.0, 19.0, 447.0, 449.0, 1e30, -torch.inf, 2**-9, 2**-10, 2**-11])
    kept = to_float8(values).float()
    assert kept.tolist() == [0.0, 1.0, 16.0, 20.0, 448.0, 448.0, 448.0, -448.0, 2**-9, 0.0, 0.0]
    assert to_float8(torch.tensor([torch.nan])).float().isnan().all()
    assert torch.finfo(FP8).max == FP8_MAX


SCALES = KvScales(0.37, 3.0)


@pytest.mark.parametrize("scales", [UNSCALED, SCALES], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("by_head", [False, True], ids=["by-position", "by-head"])
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_rotation_writes_what_a_wide_cache_would_hold(
    inputs, kernel_device, kernel_dtype, name, with_norms, by_head, scales
):
    """Bit by bit: the rotated key in the model's type, divided by its scale and narrowed."""
    ops = ROPE.resolve(kernel_device, kernel_dtype, name=name)
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 7, 6, 2, 64, 4
    qkv = inputs.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=kernel_dtype) * 3
    qkv[2, num_heads:] *= 1000  # keys and values beyond what 8 bits hold
    norms = HeadNorms(inputs.normal(2, head_dim, dtype=kernel_dtype), 1e-5) if with_norms else None
    frequencies = (1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)).to(kernel_device)
    rotary = ops.angles(frequencies, 1.0, kernel_dtype)(
        torch.arange(num_tokens, dtype=torch.int32, device=kernel_device)
    )
    slots = inputs.permutation(5 * block_size)[:num_tokens]
    slots[3] = -1
    caches = []
    for dtype in (kernel_dtype, FP8):
        shape = (
            (5, 2 * num_kv_heads, block_size, head_dim)
            if by_head
            else (5, block_size, 2 * num_kv_heads, head_dim)
        )
        cache = torch.zeros(shape, dtype=dtype, device=kernel_device)
        cache = cache.transpose(1, 2) if by_head else cache
        ops.rotate_and_store(qkv.clone(), rotary, norms, cache, slots, scales)
        caches.append(cache)
    wide, narrow = caches
    assert torch.equal(bits(narrow.contiguous()), bits(narrowed(wide, FP8, scales).contiguous()))
    assert bool((narrow.float().abs() == FP8_MAX).any())


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_copies_are_bit_by_bit(inputs, kernel_device, name):
    cache = inputs.integers(0, 256, 2 * 6 * 4 * 2 * 16).to(torch.uint8).view(FP8).view(2, 6, 4, 2, 16)
    before = bits(cache).clone()
    source, target = (torch.tensor(ids, dtype=torch.int32, device=kernel_device) for ids in ([0, 3], [5, 1]))
    KV_CACHE.resolve(kernel_device, FP8, name=name).copy_blocks(cache, source, target)
    expected = before.clone()
    expected[:, 5], expected[:, 1] = before[:, 0], before[:, 3]
    assert torch.equal(bits(cache), expected)


@pytest.mark.parametrize("by_head", [False, True], ids=["by_token", "by_head"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (4, 2, 128), (7, 1, 80)])
def test_attention(cases, inputs, kernel_device, kernel_dtype, heads, kv_heads, head_dim, by_head):
    """Rows with one query and with several, alone and beside each other."""
    shape = cases.make_shape(heads, kv_heads, head_dim=head_dim)
    attention = cases.make_attention(shape, kernel_dtype, kernel_device, cache_dtype=FP8)
    singles = [(1, 99), (1, 0), (1, 31 * cases.SCALE)]
    for rows in (singles, [(20, 0), (9, 50)], [*singles, (33, 17), (5, 160)]):
        case = cases.make_case(inputs, shape, rows, kernel_dtype, by_head=by_head, cache_dtype=FP8)
        cases.check(case, attention, kernel_dtype, layers=2)


def test_scales_are_made_up_for(cases, inputs, kernel_device, kernel_dtype):
    """Both kinds of rows; scores with a cap, and the sinks, which have no scale."""
    for changes in ({}, {"soft_cap": 3.0}):
        shape = cases.make_shape(4, 2, head_dim=64, **changes)
        sinks = inputs.normal(4)
        attention = cases.make_attention(shape, kernel_dtype, kernel_device, cache_dtype=FP8)
        rows = [(1, 99), (1, 0), (33, 17)]
        case = cases.make_case(inputs, shape, rows, kernel_dtype, sinks=sinks, cache_dtype=FP8, scales=SCALES)
        cases.check(case, attention, kernel_dtype, sinks, layers=2)


def test_attention_to_a_shared_prefix(cases, inputs, kernel_device):
    shape = cases.make_shape(4, 2, head_dim=64)
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, cache_dtype=FP8, sms=5, min_shared=128, min_sharers=2, chunk=128
    )
    rows = [(1, 270 + 3 * i) for i in range(5)]
    case = cases.make_case(inputs, shape, rows, torch.float16, shared=16, cache_dtype=FP8, scales=SCALES)
    cases.check(case, attention, torch.float16, layers=2)


def test_boxes_of_the_copy_engine(cases, inputs, kernel_device):
    shape = cases.make_shape(2, 1, head_dim=64, block_size=32)
    case = cases.make_case(inputs, shape, [(1, 70), (20, 0), (5, 157)], torch.float16, cache_dtype=FP8)
    attention = cases.make_attention(
        shape, torch.float16, kernel_device, cache_dtype=FP8, tiles_tma=True, tiles_block_n=32
    )
    cases.check(case, attention, torch.float16)


def test_the_reference_on_the_device(cases, inputs, kernel_device):
    shape = cases.make_shape(4, 2, head_dim=32)
    case = cases.make_case(
        inputs, shape, [(1, 99), (33, 0), (9, 50)], torch.float32, cache_dtype=FP8, scales=SCALES
    )
    attention = DEVICE_ATTENTION.resolve(kernel_device, torch.float32, name="reference")(
        shape, max_rows=8, max_tokens=64, max_blocks_per_row=9, dtype=torch.float32, device=kernel_device,
        cache_dtype=FP8,
    )  # fmt: skip
    cases.check(case, attention, torch.float32)


@pytest.mark.parametrize("rows", [[(1, 99), (1, 3)], [(1, 40), (33, 0), (9, 50)]], ids=str)
def test_attention_planned_on_the_host(cases, inputs, rows):
    cpu = torch.device("cpu")
    shape = cases.make_shape(4, 2, head_dim=32)
    case = cases.make_case(inputs, shape, rows, torch.float32, cache_dtype=FP8, scales=SCALES)
    step = AttentionRows(
        num_scheduled=np.array([scheduled for scheduled, _ in rows], np.int32),
        num_computed=np.array([computed for _, computed in rows], np.int32),
        num_single=sum(scheduled == 1 for scheduled, _ in rows),
        block_tables=case.step.block_tables.cpu()[case.step.row_slot.cpu()[: len(rows)].long()],
    )
    out = torch.zeros(len(case.qkv), shape.num_heads * shape.head_dim)
    plan = PAGED_ATTENTION.resolve(cpu, torch.float32)(shape, step, torch.float32)
    plan.run(case.qkv.cpu(), case.cache.cpu(), out, scales=case.scales)
    assert_close(out[: case.num_tokens], case.expected.cpu(), torch.float32, kind="attention")


def test_compiled_for_hopper():
    """Nothing is spilled, and numbers are widened to float16 by one instruction for two, not to bfloat16 by five."""
    numbers = {"table_stride": "i32", "max_rows": "i32", "scale_log2": "fp32", "value_scale": "fp32"}
    strides = dict.fromkeys(("stride_block", "stride_token", "stride_head"), "i32")
    layer = {
        "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "BLOCK_SIZE": 16, "WINDOW": 0, "SOFT_CAP": 0.0,
        "HAS_SINKS": False, "sinks": None, "USE_PDL": True,
    }  # fmt: skip
    tensors = {"qkv": "*bf16", "cache": "*fp8e4nv", "out": "*bf16", "block_tables": "*i32"}
    names = "row_slot seq_lens programs split shared_lens shared_chunks tickets"
    floats = dict.fromkeys(["partial_acc", "partial_norm", "shared_acc", "shared_norm"], "*fp32")
    module = "oneloop_kernels.ops.paged_attention.triton"
    decode = KernelSpec(
        f"{module}.decode", "decode_kernel",
        tensors | numbers | strides | floats | dict.fromkeys(names.split(), "*i32"),
        layer | {
            "BLOCK_N": 64, "GROUP_ROWS": 4, "MERGE": 16, "SHARED": 0, "STAGES": 3, "BESIDE": False,
            "WAIT_SHARED": False,
        },
        {"num_warps": 4, "launch_pdl": True}, ("max_rows",),
    )  # fmt: skip
    tiles = KernelSpec(
        f"{module}.tiles", "tiles_kernel",
        tensors | numbers | strides | dict.fromkeys(("items", "num_items", "counters"), "*i32"),
        layer | {
            "BLOCK_M": 128, "BLOCK_N": 64, "PARTIAL": False, "TMA": False, "STAGES": 3, "norm": None,
            "descriptor": None,
        },
        {"num_warps": 8, "launch_pdl": True}, ("max_rows",),
    )  # fmt: skip
    for report in compile_all_for_hopper([decode, tiles]):
        assert report.spilled <= 64
        assert report.count("LDGSTS") > 0
        assert report.count(r"F2FP\.F16\.E4M3") > 0
        assert report.count(r"F2F\.") == 0
