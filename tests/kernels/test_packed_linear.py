"""Packed linear maps: their layout, and every kernel against the plain formula with the weights written out."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.linear import NUM_TICKETS, Norm
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import PACKED_LINEAR, PackedCall, PackedWeight
from oneloop_kernels.ops.packed_linear.gpu import written_out
from oneloop_kernels.ops.packed_linear.launches import few_rows, prepared, stream, unpacked
from oneloop_kernels.ops.packed_linear.packing import Numbers, dequantize, pack, plain, unpack
from oneloop_kernels.ops.packed_linear.plans import TUNED, StreamPlan, fitting, plan_for
from oneloop_kernels.testing import assert_close, gated_scale

pytestmark = pytest.mark.usefixtures("recycled_memory")

EPS = 1e-5
COMPILE_THREADS = max(1, len(os.sched_getaffinity(0)) - 1)
SHIFTS = ("none", "zero", "offset")
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kind:
    """How a weight is stored."""

    bits: int = 4
    shift: str = "none"
    group_size: int = 128


KINDS = {
    "gptq": Kind(4, "zero", 128),
    "symmetric": Kind(4, "none", 128),
    "groups of 64": Kind(4, "zero", 64),
    "q4_0": Kind(4, "none", 32),
    "q4_k": Kind(4, "offset", 32),
    "q6_k": Kind(6, "none", 16),
    "six bits, offsets": Kind(6, "offset", 32),
    "six bits, zeros": Kind(6, "zero", 64),
    "q8_0": Kind(8, "none", 32),
    "eight bits, zeros": Kind(8, "zero", 128),
    "eight bits, offsets": Kind(8, "offset", 16),
    "a scale a row": Kind(4, "zero", 4096),
    "groups of 256": Kind(4, "none", 256),
}
FUSIONS = {
    "plain": {},
    "bias": {"bias": True},
    "norm-bias": {"norm": True, "bias": True},
    "norm-gated-bias": {"norm": True, "gated": True, "bias": True},
    "residual": {"residual": True},
    "order": {"order": True},
    "everything": {"norm": True, "gated": True, "bias": True, "residual": True, "order": True},
}
STREAMS = {
    "cut": StreamPlan(1, 4, programs=7),
    "every block apart": StreamPlan(1, 2, residents=2, programs=1000),
    "several tiles a program": StreamPlan(2, 5, residents=2, programs=3),
    "long blocks": StreamPlan(2, 3, programs=5, most_rows=32),
    "three residents": StreamPlan(1, 3, residents=3, programs=9, most_rows=16),
}
SLICES = {
    "a slice a program": StreamPlan(1, 3, residents=2, slices=True),
    "slices one after the other": StreamPlan(1, 4, residents=2, programs=3, slices=True),
}


@dataclass(frozen=True)
class Spec:
    """One call of one plan."""

    plan: StreamPlan
    kind: Kind
    num_tokens: int
    out_size: int
    in_size: int
    fusion: str = "plain"


def stream_specs():
    """Odd sizes; as few and as many rows as there may be; programs with several tiles, with pieces, with none."""
    for name, kind in KINDS.items():
        yield f"cut: {name}", Spec(STREAMS["cut"], kind, 5, 200, 456, "everything")
        yield f"long blocks: {name}", Spec(STREAMS["long blocks"], kind, 19, 200, 456)
    for fusion in FUSIONS:
        yield f"cut: {fusion}", Spec(STREAMS["cut"], KINDS["gptq"], 19, 600, 1000, fusion)
    for name, plan in STREAMS.items():
        for num_tokens in (1, 16, 40, 150):
            yield f"{name}: {num_tokens} rows", Spec(plan, KINDS["gptq"], num_tokens, 600, 520, "residual")
    for kind in ("gptq", "symmetric", "a scale a row"):
        for num_tokens in (1, 16):
            yield (
                f"sums of {kind}: {num_tokens} rows",
                Spec(STREAMS["cut"], KINDS[kind], num_tokens, 200, 456, "everything"),
            )
    yield from slice_specs()
    whole_offsets = Kind(4, "offset", 128)
    yield "sums with offsets", Spec(STREAMS["long blocks"], whole_offsets, 3, 200, 456, "everything")


def slice_specs():
    """Columns that end in a copy, rows that end in a slice; more stages than a slice has copies, and fewer."""
    for name, plan in SLICES.items():
        for fusion in FUSIONS:
            yield f"{name}: {fusion}", Spec(plan, KINDS["gptq"], 5, 200, 896, fusion)
        for kind in ("symmetric", "a scale a row", "q4_0", "q4_k", "q6_k", "q8_0"):
            yield f"{name}: {kind}", Spec(plan, KINDS[kind], 1, 72, 2432, "norm-gated-bias")
            yield f"{name}: sixteen rows of {kind}", Spec(plan, KINDS[kind], 16, 72, 640, "residual")
    offsets = Kind(4, "offset", 128)
    yield "slices with offsets", Spec(SLICES["a slice a program"], offsets, 3, 72, 640, "norm-bias")


HOPPER = dict(stream_specs())


def make_numbers(inputs, kind, rows, columns):
    """Zeros about the middle, offsets of the size of a step."""
    groups = -(-columns // kind.group_size)
    centre = 1 << (kind.bits - 1)
    values = inputs.integers(0, 2 * centre, rows, columns, dtype=torch.uint8)
    scales = inputs.normal(rows, groups).abs().add_(0.1).div_(centre)
    shifts = None
    if kind.shift == "zero":
        shifts = inputs.integers(centre // 2, centre * 3 // 2, rows, groups)
    elif kind.shift == "offset":
        shifts = inputs.normal(rows, groups).div_(centre)
    return Numbers(values, scales, kind.bits, kind.group_size, kind.shift, shifts)


def make_call(
    inputs, dtype, kind, num_tokens, out_size, in_size, *, norm=False, gated=False, bias=False, residual=False,
    order=False,
):  # fmt: skip
    """x lies inside a wider tensor of NaN, the residual too."""
    rows = 2 * out_size if gated else out_size
    wide = inputs.normal(num_tokens + 1, in_size + 16, dtype=dtype)
    wide[:, in_size:] = float("nan")
    wide[num_tokens:] = float("nan")
    numbers = make_numbers(inputs, kind, rows, in_size)
    if order:
        numbers = numbers._replace(order=inputs.permutation(in_size))
    return PackedCall(
        wide[:num_tokens, :in_size],
        pack(numbers, dtype, halves=2 if gated else 1),
        inputs.normal(rows, dtype=dtype) if bias else None,
        norm=Norm(inputs.normal(in_size, dtype=dtype), EPS) if norm else None,
        gated=gated,
        residual=inputs.normal(num_tokens, out_size + 8, dtype=dtype)[:, :out_size] if residual else None,
        tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32, device=inputs.device),
    )


def call_of(spec, inputs, dtype):
    return make_call(
        inputs, dtype, spec.kind, spec.num_tokens, spec.out_size, spec.in_size, **FUSIONS[spec.fusion]
    )


def sums(call, exact):
    """The formula in double precision, up to the activation. exact: with weights that are not rounded to x's type."""
    x = call.x.double()
    if call.norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + call.norm.eps).sqrt() * call.norm.weight.double()
    if call.weight.order is not None:
        x = x[:, call.weight.order]
    weight = plain(unpack(call.weight)._replace(order=None)) if exact else dequantize(call.weight)
    out = x @ weight.double().T
    return out if call.bias is None else out + call.bias.double()


def check(call, compute, *, exact=False):
    """The right values, written where they belong; x untouched; tickets back at zero."""
    wanted, x = sums(call, exact), call.x.clone()
    scale = None
    if call.gated:
        gate, up = wanted.chunk(2, -1)
        scale = gated_scale(gate, up) if call.norm is not None else None
        wanted = gate / (1 + (-gate).exp()) * up
    if call.residual is not None:
        wanted = wanted + call.residual.double()
    out = compute(call)
    kind = "gated " * call.gated + "linear" + " of a norm" * (call.norm is not None)
    assert_close(out, wanted, kind=kind, scale=scale)
    assert out is call.residual or call.residual is None
    assert torch.equal(call.x, x)
    assert not call.tickets.any()


def run_stream(plan):
    """Computes a call by the plan, into a result of NaN."""

    def run(call):
        call = prepared(call)
        fitted = fitting(plan, call.weight, call.x.shape[0], gated=call.gated)
        launch = stream(fitted, call)
        if call.residual is None:
            launch.out.fill_(float("nan"))
        return launch.run()

    return run


def run_few_rows(call):
    launch = few_rows(prepared(call))
    if call.residual is None:
        launch.out.fill_(float("nan"))
    return launch.run()


class Uninitialised:
    """In the place of random inputs, where kernels are only compiled."""

    def __init__(self, device):
        self.device = device

    def normal(self, *shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device=self.device)

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.ones(shape, dtype=dtype, device=self.device)

    def permutation(self, size):
        return torch.arange(size, device=self.device)


@pytest.fixture(scope="module")
def compiled(request, kernel_device):
    """On a GPU what the chosen tests of this file stream by compiles at once: one by one it takes minutes."""
    if kernel_device.type != "cuda":
        return
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    calls = [
        (one["spec"], call_of(one["spec"], Uninitialised(kernel_device), one["half_dtype"]))
        for one in chosen
        if "spec" in one
    ]
    workers = CompileWorkers.start(COMPILE_THREADS)
    with compiling_ahead(COMPILE_THREADS, workers):
        for spec, call in calls:
            run_stream(spec.plan)(call)
    if workers is not None:
        workers.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_packed_is_found_again(cpu_inputs, dtype, halves, kind):
    numbers = make_numbers(cpu_inputs, kind, 150, 328)
    weight = pack(numbers, dtype, halves=halves)
    found = unpack(weight)
    assert torch.equal(found.values, numbers.values)

    def spread(per_group, size):
        return per_group.float().repeat_interleave(size, 1)[:, :328]

    scales = spread(numbers.scales.to(dtype), kind.group_size)
    assert torch.equal(spread(found.scales, found.group_size), scales)
    if kind.shift == "zero":
        zeros = spread(numbers.shifts, kind.group_size)
        assert torch.equal(spread(found.shifts, found.group_size), zeros)
    values = numbers.values.float()
    if kind.shift == "zero":
        wanted = (values - spread(numbers.shifts, kind.group_size)) * scales
    else:
        wanted = (values - (1 << (kind.bits - 1))) * scales
    if kind.shift == "offset":
        wanted += spread(numbers.shifts.to(dtype), kind.group_size)
    assert torch.equal(dequantize(weight), wanted.to(dtype))


def test_a_group_that_cannot_be_packed_is_refused(cpu_inputs):
    numbers = make_numbers(cpu_inputs, Kind(group_size=48), 64, 96)
    with pytest.raises(ValueError, match="group_size 48: 16, 32, 64 or a multiple of 128"):
        pack(numbers, torch.float16)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_weights_written_out(inputs, half_dtype, halves, kind):
    weight = pack(make_numbers(inputs, kind, 150, 200), half_dtype, halves=halves)
    launch = unpacked(weight)
    launch.out.fill_(float("nan"))
    assert torch.equal(launch.run(), dequantize(weight))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_few_rows_on_any_card(inputs, half_dtype, fusion):
    check(make_call(inputs, half_dtype, KINDS["gptq"], 5, 72, 200, **FUSIONS[fusion]), run_few_rows)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q8_0"])
def test_kinds_on_any_card(inputs, half_dtype, kind, num_tokens):
    check(make_call(inputs, half_dtype, KINDS[kind], num_tokens, 72, 200), run_few_rows)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_many_rows(inputs, half_dtype, fusion):
    call = make_call(inputs, half_dtype, KINDS["gptq"], 70, 72, 200, **FUSIONS[fusion])
    check(call, lambda call: written_out(prepared(call)))


@pytest.mark.parametrize("num_tokens", [1, 20, 100])
@pytest.mark.parametrize("fusion", ["everything", "residual"])
def test_all_implementations_keep_the_contract(inputs, half_dtype, kernel_device, fusion, num_tokens):
    names = PACKED_LINEAR.candidates(kernel_device, half_dtype)
    assert "reference" in names
    for name in (*names, "triton"):
        call = make_call(inputs, half_dtype, KINDS["gptq"], num_tokens, 72, 200, **FUSIONS[fusion])
        plan = plan_for(call.weight, num_tokens, gated=call.gated, may_split=True)
        exact = name == "triton" and plan is not None and plan.on_sums(call.weight, num_tokens)
        check(call, PACKED_LINEAR.resolve(kernel_device, half_dtype, name=name), exact=exact)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", HOPPER.values(), ids=HOPPER)
def test_kernel_of_hopper(inputs, half_dtype, kernel_device, compiled, spec):
    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"
    call = call_of(spec, inputs, half_dtype)
    check(call, run_stream(spec.plan), exact=spec.plan.on_sums(call.weight, spec.num_tokens))


@pytest.mark.gpu
def test_streamed_sums_have_the_same_bits_every_time(inputs, half_dtype, compiled):
    call = make_call(inputs, half_dtype, KINDS["gptq"], 40, 640, 2048, gated=True)
    first, *others = (run_stream(STREAMS["every block apart"])(call) for _ in range(8))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [20, 33])
@pytest.mark.parametrize("kind", ["gptq", "q4_k", "q6_k", "q8_0"])
def test_what_is_multiplied_is_unpacked_once(inputs, kernel_device, kind, num_tokens):
    """Two programs share the tensor cores, so that products take their time while the next numbers are unpacked. Where
    these took the place of the former, one result of twenty, or of two, was off by more than its rounding."""
    call = make_call(inputs, torch.bfloat16, KINDS[kind], num_tokens, 10_240, 1024)
    found = run_stream(StreamPlan(1, 16, residents=2))(call)
    wanted = sums(call, exact=False).to(torch.bfloat16)
    assert (found != wanted).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_layers_in_one_graph(inputs, half_dtype, compiled, num_tokens):
    """Each kernel begins before the one before it has ended: what it reads early must be what never changes."""
    hidden, inner, kind = 512, 1344, KINDS["gptq"]
    start = inputs.normal(num_tokens, hidden, dtype=half_dtype)
    x, calls = start.clone(), []
    for _ in range(3):
        up = make_call(inputs, half_dtype, kind, num_tokens, inner, hidden, norm=True, gated=True)
        down = make_call(inputs, half_dtype, kind, num_tokens, hidden, inner)
        up.weight.params.view(half_dtype)[..., 0::4].mul_(0.05)
        up.weight.params.view(half_dtype)[..., 1::4].mul_(0.05)
        calls.append((up._replace(x=x), down._replace(residual=x)))

    def layers(run):
        for up, down in calls:
            run(down._replace(x=run(up) * 0.05))

    def by_cublas(call):
        return written_out(prepared(call))

    layers(by_cublas)
    wanted = x.clone()
    x.copy_(start)
    layers(run_stream(STREAMS["cut"]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(run_stream(STREAMS["cut"]))
    for _ in range(5):
        x.copy_(start)
        graph.replay()
        assert_close(x, wanted)


def test_tuned_plans_are_plans():
    """By ascending rows, their stages as many as there is room for, or fewer; slices where they can be cut."""
    for card in TUNED.values():
        for (rows, columns, gated), choices in card.items():
            tiles = (rows // 64, columns // 128)
            words = torch.empty(*tiles, 1024, dtype=torch.int32, device="meta")
            params = torch.empty(*tiles, 32, 1, dtype=torch.int32, device="meta")
            halves = 2 if gated else 1
            weight = PackedWeight(words, None, params, 4, "none", rows, columns, halves, torch.bfloat16)
            assert [most for most, _ in choices] == sorted({most for most, _ in choices})
            for most, plan in choices:
                if plan is None:
                    continue
                assert fitting(plan, weight, most, gated=gated) == plan
                assert plan.slices == plan.cuts_slices(weight, most)
                assert 1 <= plan.programs <= 132 * plan.residents


def test_where_slices_are_cut(inputs):
    """Of few rows of x, which one tile has, and whole tiles of columns; elsewhere tiles of 64 rows are."""

    def cuts(plan=SLICES["a slice a program"], num_tokens=16, in_size=384):
        call = make_call(inputs, torch.float16, KINDS["gptq"], num_tokens, 64, in_size)
        assert fitting(plan, call.weight, num_tokens, gated=False).slices == plan.cuts_slices(
            call.weight, num_tokens
        )
        return plan.cuts_slices(call.weight, num_tokens)

    assert cuts()
    assert not cuts(num_tokens=17)
    assert not cuts(in_size=400)
    assert not cuts(STREAMS["cut"])


def test_streaming_without_tickets_is_refused(inputs):
    call = make_call(inputs, torch.float16, KINDS["gptq"], 3, 640, 128)
    with pytest.raises(ValueError, match="tickets: 10 are needed"):
        stream(STREAMS["cut"], call._replace(tickets=None))
