"""The linear map of the GPU and what is fused into it, against the formulas in double precision."""

from __future__ import annotations

import pytest
import torch

from oneloop_kernels.ops.linear import LINEAR, NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.gpu import many_rows
from oneloop_kernels.ops.linear.launches import may_stream, planned
from oneloop_kernels.ops.linear.plans import (
    MAX_FEW_ROWS,
    MAX_PLANNED_ROWS,
    TUNED,
    FewRowsPlan,
    StreamPlan,
    can_stream,
    plan_for,
)
from oneloop_kernels.testing import assert_close

EPS = 1e-5
STREAM = FewRowsPlan(use_dot=False, block_n=16, block_k=64, num_warps=1)
DOT = FewRowsPlan(use_dot=True, block_n=64, block_k=32, num_stages=2, prefetch=64)
PLANS = {
    "stream": STREAM,
    "stream-split": FewRowsPlan(use_dot=False, block_n=16, block_k=32, split_k=3, num_warps=1),
    "dot": DOT,
    "dot-split": FewRowsPlan(use_dot=True, block_n=16, block_k=16, split_k=4, num_stages=2),
}
STREAMS = {
    "one tile a program": StreamPlan(block_n=64, block_k=64, num_stages=4, programs=10),
    "cut": StreamPlan(block_n=64, block_k=64, num_stages=3, programs=7),
    "every block apart": StreamPlan(block_n=64, block_k=64, num_stages=2, programs=1000),
    "several tiles a program": StreamPlan(block_n=64, block_k=64, num_stages=5, programs=3),
    "wide tiles": StreamPlan(block_n=128, block_k=128, num_stages=3, num_warps=8, programs=4),
    "more warps": StreamPlan(block_n=64, block_k=64, num_stages=4, num_warps=8, programs=7, most_rows=64),
    "rows in tiles": StreamPlan(block_n=64, block_k=128, num_stages=3, programs=9, most_rows=16),
}
FUSIONS = {
    "plain": {},
    "bias": {"bias": True},
    "norm": {"norm": True},
    "norm-bias": {"norm": True, "bias": True},
    "gated": {"gated": True},
    "norm-gated-bias": {"norm": True, "gated": True, "bias": True},
    "residual": {"residual": True},
    "everything": {"norm": True, "gated": True, "bias": True, "residual": True},
}


def expected(call):
    """The formula in double precision."""
    x = call.x.double()
    if call.norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + call.norm.eps).sqrt() * call.norm.weight.double()
    out = x @ call.weight.double().T
    if call.bias is not None:
        out += call.bias.double()
    if call.gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out if call.residual is None else out + call.residual.double()


def make_call(
    inputs, dtype, num_tokens, out_size, in_size, *, norm=False, gated=False, bias=False, residual=False
):
    """x lies inside a wider tensor, the residual too."""
    rows = 2 * out_size if gated else out_size
    wide = inputs.normal(num_tokens + 1, in_size + 16, dtype=dtype)
    wide[:, in_size:] = float("nan")  # what lies beside a row is not read into it
    wide[num_tokens:] = float("nan")  # nor what lies below the last
    added = inputs.normal(num_tokens, out_size + 8, dtype=dtype)[:, :out_size] if residual else None
    return LinearCall(
        wide[:num_tokens, :in_size],
        inputs.normal(rows, in_size, dtype=dtype),
        inputs.normal(rows, dtype=dtype) if bias else None,
        norm=Norm(inputs.normal(in_size, dtype=dtype), EPS) if norm else None,
        gated=gated,
        residual=added,
        tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32, device=inputs.device),
    )


def check(call, compute):
    """The right values, written where they belong; inputs untouched; tickets back at zero."""
    wanted, x = expected(call), call.x.clone()
    out = compute(call)
    assert_close(out, wanted, kind="gated " * call.gated + "linear" + " of a norm" * (call.norm is not None))
    assert out is call.residual or call.residual is None
    assert torch.equal(call.x, x)
    assert call.tickets is None or not call.tickets.any()


def run_plan(plan):
    """Computes a call by the plan, into a result of NaN."""

    def run(call):
        launch = planned(plan, call)
        if call.residual is None:
            launch.out.fill_(float("nan"))
        return launch.run()

    return run


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_fusion_of_every_body(inputs, kernel_dtype, plan, fusion):
    """Odd sizes: neither rows, columns nor sums are multiples of a tile."""
    call = make_call(inputs, kernel_dtype, 3, 37, 150, **FUSIONS[fusion])
    check(call, run_plan(PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 16])
def test_any_number_of_rows(inputs, kernel_dtype, plan, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens, 40, 64, norm=True, residual=True)
    check(call, run_plan(PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
def test_sums_shorter_than_the_splits(inputs, kernel_dtype, plan):
    """Some programs then have nothing to add up."""
    check(make_call(inputs, kernel_dtype, 2, 9, 24, norm=True, gated=True), run_plan(PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
def test_weights_stored_the_other_way_round(inputs, kernel_dtype, plan):
    call = make_call(inputs, kernel_dtype, 3, 37, 70, norm=True, bias=True)
    check(call._replace(weight=call.weight.t().contiguous().t()), run_plan(PLANS[plan]))


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("num_tokens", [33])
def test_many_rows(inputs, kernel_dtype, fusion, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens, 37, 150, **FUSIONS[fusion])
    check(call, many_rows)


@pytest.mark.parametrize("fusion", ["norm-gated-bias", "residual"])
@pytest.mark.parametrize("num_tokens", [1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1])
def test_what_the_family_picks(inputs, kernel_dtype, kernel_device, fusion, num_tokens):
    linear = LINEAR.resolve(kernel_device, kernel_dtype, name="triton")
    call = make_call(inputs, kernel_dtype, num_tokens, 20, 48, **FUSIONS[fusion])
    check(call, linear)
    call = make_call(inputs, kernel_dtype, num_tokens, 20, 48, **FUSIONS[fusion])
    check(call._replace(tickets=None), linear)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_all_implementations_keep_the_contract(inputs, fusion, kernel_device):
    names = LINEAR.candidates(kernel_device, torch.float32)
    assert "reference" in names
    for name in names:
        call = make_call(inputs, torch.float32, 5, 37, 150, **FUSIONS[fusion])
        linear = LINEAR.resolve(kernel_device, torch.float32, name=name)
        check(call._replace(x=call.x.contiguous()), linear)


def test_the_same_bits_every_time_although_sums_are_split(inputs, kernel_dtype):
    call = make_call(inputs, kernel_dtype, 4, 30, 150, norm=True)
    first, *others = (run_plan(PLANS["dot-split"])(call) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_a_split_without_tickets_is_refused(inputs, kernel_dtype):
    call = make_call(inputs, kernel_dtype, 1, 40, 64)
    with pytest.raises(ValueError, match="tickets: 3 are needed"):
        planned(PLANS["dot-split"], call._replace(tickets=None))


@pytest.fixture
def hopper(kernel_device):
    """For tests marked `gpu`: the interpreter knows nothing of the copy engine."""
    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("plan", ["one tile a program", "cut"])
def test_every_fusion_of_the_streaming_kernel(inputs, kernel_dtype, hopper, plan, fusion):
    """Odd sizes: neither rows, columns nor sums are multiples of a tile."""
    call = make_call(inputs, kernel_dtype, 19, 600, 1000, **FUSIONS[fusion])
    check(call, run_plan(STREAMS[plan]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "plan"),
    # Two warps side by side want sixteen rows.
    [(n, plan) for n in (1, 40, 300) for plan in STREAMS if n >= 16 or plan != "more warps"],
)
def test_any_number_of_rows_of_the_streaming_kernel(inputs, kernel_dtype, hopper, plan, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens, 600, 520, norm=True, residual=True)
    check(call, run_plan(STREAMS[plan]))


@pytest.mark.gpu
def test_streamed_sums_have_the_same_bits_every_time(inputs, kernel_dtype, hopper):
    call = make_call(inputs, kernel_dtype, 40, 640, 2048, gated=True)
    first, *others = (run_plan(STREAMS["every block apart"])(call) for _ in range(8))
    assert all(torch.equal(first, other) for other in others)


def test_streaming_without_tickets_is_refused(inputs):
    call = make_call(inputs, torch.float16, 3, 640, 64)
    with pytest.raises(ValueError, match="tickets: 10 are needed"):
        planned(STREAMS["cut"], call._replace(tickets=None))


def test_what_the_copy_engine_cannot_read_is_not_streamed(inputs):
    weight, x = inputs.normal(64, 64, dtype=torch.float16), inputs.normal(3, 72, dtype=torch.float16)
    assert may_stream(x[:, :64], weight)
    assert not may_stream(x[:, 1:65], weight), "not at a multiple of 16 bytes"
    assert not may_stream(x[:, :64], weight.t())
    assert not may_stream(inputs.normal(3, 68, dtype=torch.float16)[:, :64], weight)
    assert not may_stream(x[:, :64].float(), weight.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False),
        (4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False), (37, 30, False),
    ],
)  # fmt: skip
def test_plans_can_be_launched(kernel_device, dtype, shape):
    """Room for all rows, tickets for all tiles, no split where there are no tickets; many rows go to cuBLAS."""
    result_size = shape[0] // 2 if shape[2] else shape[0]
    for num_tokens in (*range(1, MAX_FEW_ROWS + 1), 17, 32, 33, 64, 65, 128, 256, 512):
        streamed = plan_for(kernel_device, dtype, num_tokens, shape, may_split=True, may_stream=True)
        if isinstance(streamed, StreamPlan):
            assert dtype.itemsize == 2
            assert can_stream(kernel_device)
            assert streamed.num_tiles(num_tokens, result_size) <= NUM_TICKETS
        plan = plan_for(kernel_device, dtype, num_tokens, shape, may_split=True)
        unsplit = plan_for(kernel_device, dtype, num_tokens, shape, may_split=False, may_stream=True)
        if plan is None or unsplit is None:
            assert plan is unsplit
            continue
        assert isinstance(plan, FewRowsPlan)
        assert isinstance(unsplit, FewRowsPlan)
        assert plan.block_m(num_tokens) >= num_tokens
        assert plan.split_k == 1 or plan.num_tiles(result_size) <= NUM_TICKETS
        assert unsplit.split_k == 1
    for num_tokens in (0, MAX_PLANNED_ROWS + 1):
        assert plan_for(kernel_device, dtype, num_tokens, shape, may_split=True, may_stream=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("card", TUNED)
def test_tuned_plans_are_right(inputs, hopper, card):
    """Every plan of the table at the most rows that it is taken for, against the reference in float32."""
    for shape, choices in TUNED[card].items():
        for num_tokens, plan in choices:
            if plan is None:
                continue
            out_size, in_size, gated = shape
            options = {"gated": gated, "residual": not gated}
            call = make_call(
                inputs, torch.bfloat16, num_tokens, out_size // (2 if gated else 1), in_size, **options
            )
            check(call, run_plan(plan))


def test_large_inputs_of_a_norm_do_not_overflow(inputs, kernel_dtype, kernel_device):
    """Values beyond 65504 / norm weight are inputs like any other: only their quotient enters the product."""
    linear = LINEAR.resolve(kernel_device, kernel_dtype, name="triton")
    for num_tokens in (1, 5, 20):
        call = make_call(inputs, kernel_dtype, num_tokens, 20, 64, norm=True)
        call.x.mul_(4000)
        call.norm.weight.mul_(20)
        check(call, linear)
