"""The fixed order of weights that are kept in few bits, and of experts: a row's bits are its own.

On the CPU the interpreter runs what cards other than Hopper run; with `-m gpu` on Hopper its own kernels, in bfloat16.
"""

from __future__ import annotations

import random

import pytest
import torch

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.fp8_linear import FP8_LINEAR
from oneloop_kernels.ops.fp8_linear import ordered as fp8
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan
from oneloop_kernels.ops.fp8_linear.quantize import quantize_blocks, quantize_rows
from oneloop_kernels.ops.linear import LINEAR, NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.ordered import num_pieces
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan
from oneloop_kernels.ops.moe import MOE, Experts, MoeCall, num_counters
from oneloop_kernels.ops.packed_linear import PACKED_LINEAR, PackedCall
from oneloop_kernels.ops.packed_linear.packing import Numbers, dequantize, pack
from oneloop_kernels.order import fixed_order
from oneloop_kernels.registry import prefer

pytestmark = pytest.mark.usefixtures("products_of_tensor_cores")

EPS = 1e-5
ON_GPU = torch.cuda.is_available() and not INTERPRETED
COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 200, 513) if ON_GPU else (1, 5, 70)
"""Rows of a call."""
SIZES = [(4096, 1536), (1024, 10_240)] if ON_GPU else [(128, 136)]
"""Columns of x and results, on a GPU in several pieces and in one."""
AROUND = {"plain": {}, "gated": {"norm": True, "gated": True}, "residual": {"residual": True}}
KINDS = {
    "gptq": (4, "zero", 128),
    "q4_k": (4, "offset", 32),
    "q6_k": (6, "none", 16),
    "q8_0": (8, "none", 32),
}
"""Bits, shift, columns of a group."""


class Rows:
    """x, and what is around a map of that size, for calls of some rows."""

    def __init__(self, inputs, dtype, in_size, out_size, *, norm=False, gated=False, residual=False):
        self.x = inputs.normal(max(COUNTS), in_size, dtype=dtype)
        result = out_size // 2 if gated else out_size
        self.before = inputs.normal(max(COUNTS), result, dtype=dtype) if residual else None
        self.norm = Norm(inputs.normal(in_size, dtype=dtype), EPS) if norm else None
        self.gated = gated
        self.tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=inputs.device)

    def arguments(self, rows):
        before = None if self.before is None else self.before[rows].clone()
        return self.x[rows].contiguous(), {
            "norm": self.norm, "gated": self.gated, "residual": before, "tickets": self.tickets,
        }  # fmt: skip


def check_rows(same_bits, compute):
    """compute: slice of the rows → their results. Some by themselves, at another place each time; → all of them."""
    rng = random.Random(2)
    most = max(COUNTS)
    with prefer("triton"), fixed_order():
        whole = compute(slice(0, most))
        for count in COUNTS:
            first = rng.randrange(most - count + 1)
            same_bits(compute(slice(first, first + count)), whole[first : first + count])
    return whole


@pytest.mark.gpu
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
@pytest.mark.parametrize(("in_size", "out_size"), SIZES)
def test_a_map_of_8_bits(inputs, kernel_device, order_dtype, same_bits, around, by_block, in_size, out_size):
    rows = Rows(inputs, order_dtype, in_size, out_size, **AROUND[around])
    plain = inputs.normal(out_size, in_size) * in_size**-0.5
    weight, scales = quantize_blocks(plain, 128) if by_block else quantize_rows(plain)
    compute = FP8_LINEAR.resolve(kernel_device, order_dtype)

    def call(some):
        x, more = rows.arguments(some)
        return compute(LinearCall(x, weight, **more), scales)

    whole = check_rows(same_bits, call).double()
    default = call(slice(None)).double()
    assert (whole - default).square().mean() <= 1e-4 * default.square().mean()


def test_plans_of_8_bits():
    """On Hopper a program has whole tiles, or a piece each; elsewhere there is one tile for all."""
    device = torch.device("cpu")
    for shape in ((4096, 4096, False), (28672, 4096, True), (4096, 14336, False)):
        pieces = num_pieces(shape, 1)
        assert shape[1] % (256 * pieces) == 0
        for rows in (1, 64, 65, 2048):
            plan = fp8.in_order(None, device, rows, shape, has_tickets=True, item_bytes=1)
            assert isinstance(plan, StreamPlan if rows <= 64 else DensePlan)
            if isinstance(plan, StreamPlan):
                assert plan.block_k == 256
                assert plan.whole is (pieces == 1)
            else:
                assert plan.pieces == pieces
        for rows in (1, 64, 65, 2048):
            plan = fp8._by_block(rows, shape)
            assert plan.whole if rows <= 64 else isinstance(plan, TilesPlan)
        elsewhere = {
            fp8.plan_for(device, rows, shape, by_block=by_block, may_stream=True, has_tickets=True)
            for rows in (1, 64, 65, 2048)
            for by_block in (False, True)
        }
        assert len(elsewhere) == 1


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_size", "out_size"), SIZES)
def test_a_packed_map(inputs, kernel_device, order_dtype, same_bits, around, kind, in_size, out_size):
    """Its bits are those of the weight written out."""
    dtype = order_dtype if kernel_device.type == "cuda" else torch.float16
    rows = Rows(inputs, dtype, in_size, out_size, **AROUND[around])
    bits, shift, group = KINDS[kind]
    centre, groups = 1 << (bits - 1), in_size // group
    shifts = {
        "none": None,
        "zero": inputs.integers(centre // 2, centre * 3 // 2, out_size, groups),
        "offset": inputs.normal(out_size, groups) / centre,
    }[shift]
    scales = (inputs.normal(out_size, groups).abs() + 0.1) / centre * in_size**-0.5
    values = inputs.integers(0, 2 * centre, out_size, in_size, dtype=torch.uint8)
    numbers = Numbers(values, scales, bits, group, shift, shifts)
    weight = pack(numbers, dtype, halves=2 if rows.gated else 1)
    plain = dequantize(weight)
    with prefer("triton"):
        compute, compute_plain = (family.resolve(kernel_device, dtype) for family in (PACKED_LINEAR, LINEAR))

    def call(some):
        x, more = rows.arguments(some)
        return compute(PackedCall(x, weight, **more))

    def call_plain(some):
        x, more = rows.arguments(some)
        return compute_plain(LinearCall(x, plain, **more))

    same_bits(check_rows(same_bits, call), check_rows(same_bits, call_plain))


@pytest.mark.parametrize("count", [1, 64, 70])
def test_packed_maps_take_turns(inputs, kernel_device, order_dtype, same_bits, count):
    """Two weights are written out to the same memory, one after the other: neither product reads the other's."""
    dtype = order_dtype if kernel_device.type == "cuda" else torch.float16
    in_size, out_size = SIZES[-1]
    rows = Rows(inputs, dtype, in_size, out_size)
    weights = []
    for _ in range(2):
        values = inputs.integers(0, 16, out_size, in_size, dtype=torch.uint8)
        scales = (inputs.normal(out_size, in_size // 128).abs() + 0.1) / 8 * in_size**-0.5
        weights.append(pack(Numbers(values, scales, 4, 128, "none", None), dtype, halves=1))
    compute, compute_plain = (family.resolve(kernel_device, dtype) for family in (PACKED_LINEAR, LINEAR))
    x, more = rows.arguments(slice(0, count))
    with prefer("triton"), fixed_order():
        found = [compute(PackedCall(x, weight, **more)) for _ in range(5) for weight in weights]
        expected = [compute_plain(LinearCall(x, dequantize(weight), **more)) for weight in weights]
    for number, one in enumerate(found):
        same_bits(one, expected[number % 2])


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "and a shared one"])
def test_experts(device_inputs, kernel_device, order_dtype, same_bits, shared):
    """Whoever else is sent to a token's experts, and however many tokens are routed together."""
    hidden, width, num_experts, top_k = (2048, 768, 128, 8) if ON_GPU else (96, 40, 12, 3)
    dtype, most = order_dtype, max(COUNTS)
    experts = Experts(
        device_inputs.normal(num_experts + shared, hidden, dtype=dtype) * 0.3,
        device_inputs.normal(num_experts, 2 * width, hidden, dtype=dtype) * hidden**-0.5,
        device_inputs.normal(num_experts, hidden, width, dtype=dtype) * width**-0.5,
        top_k,
        True,
    )
    x, own = device_inputs.normal(most, hidden, dtype=dtype), device_inputs.normal(most, hidden, dtype=dtype)
    norm = Norm(device_inputs.normal(hidden, dtype=dtype), EPS)
    counters = torch.zeros(num_counters(num_experts), dtype=torch.int32, device=kernel_device)
    with prefer("triton"):
        compute = MOE.resolve(kernel_device, dtype)

    def call(rows):
        result = x[rows].clone()
        compute(MoeCall(result, experts, norm, counters, shared=own[rows] if shared else None))
        return result

    whole, default = check_rows(same_bits, call).double(), call(slice(None)).double()
    beyond = (whole - default).abs() > 8 * torch.finfo(dtype).eps * whole.abs().max()
    assert beyond.any(1).sum() <= 0.02 * most, (
        "more than a few tokens between two experts chose the other one"
    )
