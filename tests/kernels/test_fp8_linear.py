"""8-bit linear maps of the GPU and the quantisation before them, against the formulas in double precision."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear import BLOCK, FP8_LINEAR
from oneloop_kernels.ops.fp8_linear.gpu import by_plan, linear
from oneloop_kernels.ops.fp8_linear.plans import TUNED, TilesPlan, plan_by_rule, plan_for
from oneloop_kernels.ops.fp8_linear.quantize import dequantized, quantize_blocks, quantize_rows
from oneloop_kernels.ops.fp8_linear.triton.quantize import quantize
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan, can_stream
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.ops.silu_mul.reference import silu_mul
from oneloop_kernels.testing import assert_close, gated_error, gated_scale
from oneloop_kernels.testing.short_sums import allowance

EPS = 1e-5
FUSIONS = {
    "plain": {},
    "bias": {"bias": True},
    "norm": {"norm": True},
    "gated": {"gated": True},
    "norm-gated-bias": {"norm": True, "gated": True, "bias": True},
    "residual": {"residual": True},
    "everything": {"norm": True, "gated": True, "bias": True, "residual": True},
}
TILES = TilesPlan(16, block_n=64, num_stages=2, num_warps=4)
BY_ROW = {
    "one tile a program": StreamPlan(block_n=64, block_k=128, num_stages=4, programs=10),
    "cut": StreamPlan(block_n=64, block_k=256, num_stages=3, programs=7),
    "several tiles a program": StreamPlan(block_n=64, block_k=128, num_stages=5, programs=3),
    "wide tiles": StreamPlan(block_n=128, block_k=128, num_stages=3, num_warps=8, programs=4),
    "rows in tiles": StreamPlan(block_n=64, block_k=256, num_stages=3, programs=9, most_rows=16),
    "dense": DensePlan((64, 32, 16), 3),
    "dense, 64 rows": DensePlan((32,), 6, block_m=64),
    "tiles": TilesPlan(64, num_warps=4),
    "cuBLAS": None,
}
BY_BLOCK = {
    "one tile a program": StreamPlan(block_n=64, block_k=BLOCK, num_stages=4, programs=10),
    "cut": StreamPlan(block_n=64, block_k=BLOCK, num_stages=3, programs=7),
    "wide tiles": StreamPlan(block_n=128, block_k=BLOCK, num_stages=3, num_warps=8, programs=4),
    "rows in tiles": StreamPlan(block_n=64, block_k=BLOCK, num_stages=3, programs=9, most_rows=16),
    "tiles": TilesPlan(128),
}


def cases(plans, in_all_fusions):
    """Some plans with everything around them; all with few and many rows."""
    for name in in_all_fusions:
        yield from ((name, 40, fusion) for fusion in FUSIONS)
    for name in plans:
        yield from ((name, num_tokens, "residual") for num_tokens in (1, 7, 300))
        yield name, 300, "norm-gated-bias"


@pytest.fixture
def hopper(kernel_device):
    """Tests that ask for it launch what only Hopper runs."""
    assert can_stream(kernel_device)


def make_call(
    inputs, dtype, num_tokens, out_size, in_size, *, by_block, block_rows=BLOCK, norm=False, gated=False, bias=False,
    residual=False,
):  # fmt: skip
    """A call and the scales of its weight. x lies inside a wider tensor of NaN, the residual too."""
    rows = 2 * out_size if gated else out_size
    wide = inputs.normal(num_tokens + 1, in_size + 16, dtype=dtype)
    wide[:, in_size:] = float("nan")  # what lies beside a row is not read into it
    wide[num_tokens:] = float("nan")  # nor what lies below the last
    plain = inputs.normal(rows, in_size) * in_size**-0.5
    weight, scales = quantize_blocks(plain, block_rows) if by_block else quantize_rows(plain)
    call = LinearCall(
        wide[:num_tokens, :in_size],
        weight,
        inputs.normal(rows, dtype=dtype) if bias else None,
        norm=Norm(inputs.normal(in_size, dtype=dtype), EPS) if norm else None,
        gated=gated,
        residual=inputs.normal(num_tokens, out_size + 8, dtype=dtype)[:, :out_size] if residual else None,
        tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32, device=inputs.device),
    )
    return call, scales


class Expected(NamedTuple):
    """values: of the formula on what the kernel quantises x to. The rest is what `assert_close` takes."""

    values: torch.Tensor
    kind: str
    scale: torch.Tensor | None
    more: torch.Tensor | None


def in_double(call, scales, *, of_gate=False) -> Expected:
    by_block = scales.dim() == 2
    values, factors = quantize(call.x, norm=call.norm, gated=of_gate, by_block=by_block)
    x = dequantized(values, factors.t().contiguous() if by_block else factors).double()
    out = x @ dequantized(call.weight, scales).double().t()
    more = allowance(out, BLOCK if by_block else x.shape[1]) if can_stream(out.device) else None
    if call.bias is not None:
        out += call.bias.double()
    kind, scale = "linear", None
    if call.gated:
        kind, (gate, up) = "gated linear", out.chunk(2, -1)
        scale = gated_scale(gate, up)
        more = None if more is None else gated_error(gate, up, *more.chunk(2, -1))
        out = silu_mul(out)
    return Expected(out if call.residual is None else out + call.residual.double(), kind, scale, more)


def compare(out, expected: Expected):
    assert_close(out, expected.values, kind=expected.kind, scale=expected.scale, more=expected.more)


def check(call, scales, plan, dtype):
    expected = in_double(call, scales)
    if call.residual is not None:
        call = call._replace(residual=call.residual.clone())
    out = by_plan(plan, call, scales)
    if call.residual is not None:
        assert out.data_ptr() == call.residual.data_ptr()
    assert out.dtype == dtype
    assert not call.tickets.any()
    compare(out, expected)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
def test_tiles(inputs, kernel_dtype, fusion, by_block):
    """Odd sizes, in the interpreter too: neither rows, columns nor sums are multiples of a tile."""
    call, scales = make_call(
        inputs, kernel_dtype, 19, 100, 200, by_block=by_block, block_rows=20, **FUSIONS[fusion]
    )
    check(call, scales, TILES, kernel_dtype)


def test_tiles_of_weights_that_share_a_scale(inputs, kernel_dtype):
    call, scales = make_call(inputs, kernel_dtype, 5, 192, 300, by_block=True, block_rows=64, gated=True)
    check(call, scales, TilesPlan(16, block_n=128, num_stages=2, num_warps=4), kernel_dtype)


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
def test_a_gate_that_the_map_before_has_left(inputs, kernel_device, kernel_dtype, name, by_block):
    compute = FP8_LINEAR.resolve(kernel_device, kernel_dtype, name=name)
    call, scales = make_call(
        inputs, kernel_dtype, 9, 96, 208, by_block=by_block, block_rows=32, residual=True
    )
    gate_up = inputs.normal(9, 416, dtype=kernel_dtype)
    given = call._replace(x=gate_up)
    if name == "triton":
        expected = in_double(given, scales, of_gate=True)
    else:
        plain = silu_mul(gate_up.clone())
        x = dequantized(*(quantize_blocks(plain) if by_block else quantize_rows(plain))).double()
        product = x @ dequantized(call.weight, scales).double().t()
        expected = Expected(call.residual.double() + product, "linear", None, None)
    out = compute(given, scales, of_gate=True)
    assert out.data_ptr() == call.residual.data_ptr()
    compare(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("plan", "num_tokens", "fusion"), list(cases(BY_ROW, ["cut", "dense", "cuBLAS"])))
def test_plans_of_scales_by_row(inputs, hopper, plan, num_tokens, fusion):
    call, scales = make_call(inputs, torch.bfloat16, num_tokens, 608, 1040, by_block=False, **FUSIONS[fusion])
    check(call, scales, BY_ROW[plan], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 128])
@pytest.mark.parametrize(("plan", "num_tokens", "fusion"), list(cases(BY_BLOCK, ["cut", "tiles"])))
def test_plans_of_scales_by_block(inputs, hopper, plan, num_tokens, fusion, rows):
    call, scales = make_call(
        inputs, torch.bfloat16, num_tokens, 640, 1040, by_block=True, block_rows=rows, **FUSIONS[fusion]
    )
    check(call, scales, BY_BLOCK[plan], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 64, 128, 256, 1000])
def test_what_the_family_takes(device_inputs, hopper, by_block, num_tokens):
    """The shapes of Llama 3 8B; cut rows are compared in full."""
    for out_size, in_size, fusion in (
        (6144, 4096, "norm"), (4096, 4096, "residual"), (14336, 4096, "gated"), (4096, 14336, "residual")
    ):  # fmt: skip
        call, scales = make_call(
            device_inputs, torch.bfloat16, num_tokens, out_size, in_size, by_block=by_block, **FUSIONS[fusion]
        )
        expected = in_double(call, scales)
        compare(linear(call, scales), expected)


@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
@pytest.mark.parametrize("before", ["nothing", "norm", "gate"])
@pytest.mark.parametrize("size", [96, 128, 700])
def test_quantisation(inputs, kernel_dtype, by_block, before, size):
    """As the reference's, but for what lies on the edge between two numbers of 8 bits."""
    gated = before == "gate"
    x = inputs.normal(6, 2 * size if gated else size, dtype=kernel_dtype) * torch.tensor(
        3.0, dtype=kernel_dtype
    )
    x[2] = 0
    norm = Norm(inputs.normal(size, dtype=kernel_dtype), EPS) if before == "norm" else None
    plain = x if norm is None else rms_norm(x, norm.weight, EPS)
    if gated:
        plain = silu_mul(x.double()).to(kernel_dtype)  # rounded once, as there
    wanted, wanted_scales = quantize_blocks(plain) if by_block else quantize_rows(plain)
    values, scales = quantize(x, norm=norm, gated=gated, by_block=by_block)
    torch.testing.assert_close(scales, wanted_scales.t() if by_block else wanted_scales, rtol=1e-2, atol=1e-9)
    found, expected = values.float(), wanted.float()
    steps = (found - expected).abs() / torch.clamp(expected.abs(), min=2.0**-6)
    assert steps.max() <= 0.126  # of three bits behind the point
    assert (steps > 0).float().mean() < 0.05
    assert not values[2].float().any()


@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
def test_what_is_no_number_stays_none(inputs, kernel_dtype, by_block):
    """And is no other element's matter."""
    x = inputs.normal(3, 300, dtype=kernel_dtype)
    x[1, 5] = 0.0
    clean, _ = quantize(x, by_block=by_block)
    x[1, 5] = math.nan
    values, _ = quantize(x, by_block=by_block)
    assert values.float().isnan().nonzero().tolist() == [[1, 5]]
    others = torch.ones_like(x, dtype=torch.bool)
    others[1, 5] = False
    assert torch.equal(values.float()[others], clean.float()[others])


@pytest.mark.parametrize("by_block", [False, True], ids=["by row", "by block"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_reference(inputs, fusion, by_block):
    """Plain torch, in float32: what any device has."""
    call, scales = make_call(
        inputs, torch.float32, 5, 64, 200, by_block=by_block, block_rows=32, **FUSIONS[fusion]
    )
    x = call.x if call.norm is None else rms_norm(call.x, call.norm.weight, EPS)
    wide = dequantized(*(quantize_blocks(x) if by_block else quantize_rows(x))).double()
    expected = wide @ dequantized(call.weight, scales).double().t()
    expected = expected if call.bias is None else expected + call.bias.double()
    expected = silu_mul(expected) if call.gated else expected
    expected = expected if call.residual is None else expected + call.residual.double()
    out = FP8_LINEAR.resolve(call.x.device, torch.float32, name="reference")(call, scales)
    assert_close(out, expected, kind="gated linear" if call.gated else "linear")


def test_quantised_weights_are_near():
    """Three bits behind the point: half a step is 1/16 at most, or of the smallest step near zero."""
    plain = torch.randn(70, 300)
    for stored, scales, rows in (
        (*quantize_rows(plain), 1), (*quantize_blocks(plain, 64), 64), (*quantize_blocks(plain), 1)
    ):  # fmt: skip
        assert stored.dtype == FP8
        every_row = scales if scales.dim() == 1 else scales.repeat_interleave(rows, dim=0)[:70]
        error = (dequantized(stored, every_row) - plain).abs()
        factors = dequantized(torch.ones_like(plain).to(FP8), every_row)
        assert (error <= torch.maximum(plain.abs() / 16, factors * 2.0**-10) * 1.001).all()


def test_plans_say_how_far_they_reach():
    for card in TUNED.values():
        for choices in card.values():
            assert [most for most, _ in choices] == sorted({most for most, _ in choices})
    assert isinstance(plan_by_rule(64, (512, 512, False), by_block=False), StreamPlan)
    assert plan_by_rule(65, (512, 512, False), by_block=False) is None
    assert isinstance(plan_by_rule(65, (512, 512, False), by_block=True), TilesPlan)
    assert isinstance(
        plan_for(torch.device("cpu"), 3, (512, 512, False), by_block=False, may_stream=True), TilesPlan
    )
