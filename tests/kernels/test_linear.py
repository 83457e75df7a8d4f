"""The linear maps of the GPU and what is fused into them, against the formulas in double precision."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.linear import LINEAR, NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.gpu import many_rows
from oneloop_kernels.ops.linear.launches import may_stream, planned
from oneloop_kernels.ops.linear.plans import (
    MAX_FEW_ROWS,
    MAX_PLANNED_ROWS,
    TUNED,
    DensePlan,
    FewRowsPlan,
    StreamPlan,
    can_stream,
    plan_for,
)
from oneloop_kernels.testing import assert_close, gated_scale

if TYPE_CHECKING:
    from oneloop_kernels.ops.linear.plans import Plan

EPS = 1e-5
COMPILE_THREADS = max(1, len(os.sched_getaffinity(0)) - 1)
PLANS = {
    "registers": FewRowsPlan(use_dot=False, block_n=16, block_k=64, num_warps=1),
    "registers, split": FewRowsPlan(use_dot=False, block_n=16, block_k=32, split_k=3, num_warps=1),
    "dot": FewRowsPlan(use_dot=True, block_n=64, block_k=32, num_stages=2, prefetch=64),
    "dot, split": FewRowsPlan(use_dot=True, block_n=16, block_k=16, split_k=4, num_stages=2),
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
DENSE = {
    "one width": DensePlan((64,), 4),
    "two widths": DensePlan((16, 8), 3),
    "three widths": DensePlan((64, 32, 16), 4),
    "few chunks": DensePlan((128,), 3),
    "64 rows": DensePlan((32, 8), 6, block_m=64),
    "pieces": DensePlan((64, 16), 4, pieces=3),
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


@dataclass(frozen=True)
class Spec:
    """One call of one plan."""

    plan: Plan
    num_tokens: int
    out_size: int
    in_size: int
    fusion: str = "plain"


def few_rows_specs():
    """Odd sizes: neither rows, columns nor sums are multiples of a tile; sums shorter than the splits."""
    for name, plan in PLANS.items():
        for fusion in FUSIONS:
            yield f"{name}: {fusion}", Spec(plan, 3, 37, 150, fusion)
        for num_tokens in (1, 2, 4, 5, 16):
            yield f"{name}: {num_tokens} rows", Spec(plan, num_tokens, 40, 64, "everything")
        yield f"{name}: short sums", Spec(plan, 2, 9, 24, "norm-gated-bias")


def hopper_specs():
    """Odd sizes; as few and as many rows as there may be; programs with several tiles, with pieces, with none."""
    for name in ("one tile a program", "cut"):
        for fusion in FUSIONS:
            yield f"stream {name}: {fusion}", Spec(STREAMS[name], 19, 600, 1000, fusion)
    for name, plan in STREAMS.items():
        for num_tokens in (1, 40, 300):
            if num_tokens >= 16 or name != "more warps":  # two warps side by side want sixteen rows
                yield f"stream {name}: {num_tokens} rows", Spec(plan, num_tokens, 600, 520, "residual")
    for fusion in FUSIONS:
        yield f"dense three widths: {fusion}", Spec(DENSE["three widths"], 200, 600, 1000, fusion)
    for name, plan in DENSE.items():
        for num_tokens, fusion in ((5, "bias"), (128, "residual"), (300, "gated"), (700, "everything")):
            yield f"dense {name}: {num_tokens} rows", Spec(plan, num_tokens, 1000, 136, fusion)


FEW_ROWS, HOPPER = dict(few_rows_specs()), dict(hopper_specs())


class Uninitialised:
    """In the place of random inputs, where kernels are only compiled."""

    def __init__(self, device):
        self.device = device

    def normal(self, *shape, dtype):
        return torch.empty(shape, dtype=dtype, device=self.device)


def make_call(
    inputs, dtype, num_tokens, out_size, in_size, *, norm=False, gated=False, bias=False, residual=False
):
    """x lies inside a wider tensor of NaN, the residual too."""
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


def call_of(spec, inputs, dtype):
    return make_call(inputs, dtype, spec.num_tokens, spec.out_size, spec.in_size, **FUSIONS[spec.fusion])


def sums(call, wide=torch.float64):
    """The formula, up to the activation."""
    x = call.x.to(wide)
    if call.norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + call.norm.eps).sqrt() * call.norm.weight.to(wide)
    out = x @ call.weight.to(wide).T
    if call.bias is not None:
        out += call.bias.to(wide)
    return out


def expected(call, wide=torch.float64):
    """The formula."""
    out = sums(call, wide)
    if call.gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out if call.residual is None else out + call.residual.to(wide)


def check(call, compute, wide=torch.float64):
    """The right values, written where they belong; inputs untouched; tickets back at zero."""
    wanted, x = expected(call, wide), call.x.clone()
    errs_twice = (
        call.gated and call.norm is not None
    )  # then the size of an error differs from element to element
    scale = gated_scale(*sums(call, torch.float64).chunk(2, -1)) if errs_twice else None
    out = compute(call)
    assert_close(
        out,
        wanted,
        kind="gated " * call.gated + "linear" + " of a norm" * (call.norm is not None),
        scale=scale,
    )
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


@pytest.fixture(scope="module")
def compiled(request, kernel_device):
    """On a GPU the kernels of this file compile at once: one after the other they take minutes."""
    if kernel_device.type != "cuda":
        return
    chosen = [item for item in request.session.items if item.path == request.path]
    with compiling_ahead(COMPILE_THREADS):
        for plan, call in launches_of(chosen, Uninitialised(kernel_device)):
            planned(plan, call).run()


def launches_of(tests, inputs):
    """(plan, call) of these tests; others of the file, which another process may run, have kernels of their own."""
    for test in tests:
        params = test.callspec.params if hasattr(test, "callspec") else {}
        if "spec" in params:
            yield params["spec"].plan, call_of(params["spec"], inputs, params["kernel_dtype"])
        elif test.originalname == test_tuned_plans_are_right.__name__:
            for shape, num_tokens, plan in tuned_plans():
                if shape == params["shape"]:
                    yield plan, tuned_call(inputs, shape, num_tokens)


@pytest.fixture
def hopper(kernel_device, compiled):
    """For tests marked `gpu`: the interpreter knows nothing of the copy engine."""
    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"


@pytest.mark.parametrize("spec", FEW_ROWS.values(), ids=FEW_ROWS)
def test_kernels_of_any_card(inputs, kernel_dtype, compiled, spec):
    check(call_of(spec, inputs, kernel_dtype), run_plan(spec.plan))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", HOPPER.values(), ids=HOPPER)
def test_kernels_of_hopper(inputs, kernel_dtype, hopper, spec):
    check(call_of(spec, inputs, kernel_dtype), run_plan(spec.plan))


@pytest.mark.parametrize("plan", PLANS)
def test_weights_stored_the_other_way_round(inputs, kernel_dtype, plan):
    call = make_call(inputs, kernel_dtype, 3, 37, 70, norm=True, bias=True)
    check(call._replace(weight=call.weight.t().contiguous().t()), run_plan(PLANS[plan]))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_many_rows(inputs, kernel_dtype, fusion):
    check(make_call(inputs, kernel_dtype, 33, 37, 150, **FUSIONS[fusion]), many_rows)


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
    first, *others = (run_plan(PLANS["dot, split"])(call) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_streamed_sums_have_the_same_bits_every_time(inputs, kernel_dtype, hopper):
    call = make_call(inputs, kernel_dtype, 40, 640, 2048, gated=True)
    first, *others = (run_plan(STREAMS["every block apart"])(call) for _ in range(8))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("plans", ["streams", "dense", "in turns"])
def test_layers_in_one_graph(inputs, kernel_device, hopper, plans):
    """Each kernel begins before the one before it has ended: what it reads early must be what never changes."""
    stream, dense = STREAMS["cut"], DENSE["three widths"]
    up_plan, down_plan = {"streams": (stream, stream), "dense": (dense, dense)}.get(plans, (dense, stream))
    num_tokens, hidden, inner = 96, 512, 1344
    start = inputs.normal(num_tokens, hidden, dtype=torch.bfloat16)
    x, calls = start.clone(), []
    for _ in range(3):
        up = make_call(inputs, torch.bfloat16, num_tokens, inner, hidden, norm=True, gated=True)
        down = make_call(inputs, torch.bfloat16, num_tokens, hidden, inner)
        up.weight.mul_(hidden**-0.5)
        down.weight.mul_(inner**-0.5)
        calls.append((up._replace(x=x), down._replace(residual=x)))

    def layers(run_up, run_down):
        for up, down in calls:
            run_down(down._replace(x=run_up(up)))

    layers(many_rows, many_rows)
    wanted = x.clone()
    x.copy_(start)
    layers(run_plan(up_plan), run_plan(down_plan))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(run_plan(up_plan), run_plan(down_plan))
    for _ in range(5):
        x.copy_(start)
        graph.replay()
        assert_close(x, wanted)


def test_a_split_without_tickets_is_refused(inputs, kernel_dtype):
    call = make_call(inputs, kernel_dtype, 1, 40, 64)
    with pytest.raises(ValueError, match="tickets: 3 are needed"):
        planned(PLANS["dot, split"], call._replace(tickets=None))


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
@pytest.mark.parametrize("shape", [*next(iter(TUNED.values())), (37, 30, False)], ids=str)
def test_plans_can_be_launched(kernel_device, dtype, shape):
    """Room for all rows, tickets for all tiles, no split where there are no tickets; many rows go to cuBLAS."""
    result_size = shape[0] // 2 if shape[2] else shape[0]
    for num_tokens in (*range(1, MAX_FEW_ROWS + 1), 17, 32, 33, 64, 65, 128, 256, 512):
        best = plan_for(kernel_device, dtype, num_tokens, shape, may_split=True, may_stream=True)
        if isinstance(best, StreamPlan | DensePlan):
            assert dtype.itemsize == 2
            assert can_stream(kernel_device)
        if isinstance(best, StreamPlan):
            assert best.num_tiles(num_tokens, result_size) <= NUM_TICKETS
        plan = plan_for(kernel_device, dtype, num_tokens, shape, may_split=True)
        unsplit = plan_for(kernel_device, dtype, num_tokens, shape, may_split=False)
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


def tuned_plans():
    """(shape, rows, plan) of every tuned plan, at the most rows that it is taken for."""
    return [
        (shape, num_tokens, plan)
        for card in TUNED.values()
        for shape, choices in card.items()
        for num_tokens, plan in choices
        if plan is not None
    ]


def tuned_call(inputs, shape, num_tokens):
    out_size, in_size, gated = shape
    out_size = out_size // 2 if gated else out_size
    return make_call(inputs, torch.bfloat16, num_tokens, out_size, in_size, gated=gated, residual=not gated)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for card in TUNED.values() for shape in card], ids=str)
def test_tuned_plans_are_right(device_inputs, hopper, shape):
    """Weights of one shape serve all of its plans; float32 is exact enough for them, and double precision slow."""
    plans = [(num_tokens, plan) for other, num_tokens, plan in tuned_plans() if other == shape]
    full = tuned_call(device_inputs, shape, max(num_tokens for num_tokens, _ in plans))
    for num_tokens, plan in plans:
        call = full._replace(x=full.x[:num_tokens])
        if full.residual is not None:
            call = call._replace(residual=full.residual[:num_tokens].clone())
        check(call, run_plan(plan), torch.float32)


def test_large_inputs_of_a_norm_do_not_overflow(inputs, kernel_dtype, kernel_device):
    """Values beyond 65504 / norm weight are inputs like any other: only their quotient enters the product."""
    linear = LINEAR.resolve(kernel_device, kernel_dtype, name="triton")
    for num_tokens in (1, 5, 20):
        call = make_call(inputs, kernel_dtype, num_tokens, 20, 64, norm=True)
        call.x.mul_(4000)
        call.norm.weight.mul_(20)
        check(call, linear)
