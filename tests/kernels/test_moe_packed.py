"""Experts of a few bits: every implementation against the definition in float64 with their weights written out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from oneloop.formats.quantization.packed import Form
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.linear import Norm
from oneloop_kernels.ops.moe import MOE, Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.launches import combines, shape_of
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.moe.plans import Shape, plan_for, plan_of_packed
from oneloop_kernels.ops.packed_linear.packing import Numbers, dequantize, joined, pack
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.order import fixed_order
from oneloop_kernels.testing import assert_close


class Kind(NamedTuple):
    """How the weights are stored."""

    bits: int = 4
    shift: str = "none"
    group_size: int = 128
    ordered: bool = False


KINDS = {
    "gptq": Kind(4, "zero", 128),
    "symmetric": Kind(),
    "by activation": Kind(4, "zero", 32, ordered=True),
    "a scale a row": Kind(4, "none", 4096),
    "q4_0": Kind(4, "none", 32),
    "q4_k": Kind(4, "offset", 32),
    "q5_0": Kind(6, "none", 32),
    "q6_k": Kind(6, "none", 16),
    "q8_0": Kind(8, "none", 32),
}
NUM_EXPERTS, TOP_K = 6, 2
COMPILE_THREADS = max(1, len(os.sched_getaffinity(0)) - 1)


@pytest.fixture(params=["reference", "triton"])
def moe(request, kernel_device, half_dtype):
    return MOE.resolve(kernel_device, half_dtype, name=request.param)


def make_numbers(inputs, kind, rows, columns, order=None):
    """Weights of about columns^-0.5."""
    groups, centre = -(-columns // kind.group_size), 1 << (kind.bits - 1)
    scales = inputs.normal(rows, groups).abs().add_(0.5).div_(centre * columns**0.5)
    shifts = None
    if kind.shift == "zero":
        shifts = inputs.integers(centre - 2, centre + 3, rows, groups)
    elif kind.shift == "offset":
        shifts = inputs.normal(rows, groups) * columns**-0.5 / 4
    values = inputs.integers(0, 2 * centre, rows, columns, dtype=torch.uint8)
    return Numbers(values, scales, kind.bits, kind.group_size, kind.shift, shifts, order)


def make_stack(inputs, dtype, kind, rows, columns, halves):
    stack = PackedStack.empty(
        NUM_EXPERTS, rows, columns, halves=halves, bits=kind.bits, shift=kind.shift, group_size=kind.group_size,
        ordered=kind.ordered, dtype=dtype, device=inputs.device,
    )  # fmt: skip
    for expert in range(NUM_EXPERTS):
        order = inputs.permutation(columns) if kind.ordered else None
        for half in range(halves):
            stack.put(expert, make_numbers(inputs, kind, rows // halves, columns, order), half)
    return stack


def make_call(inputs, dtype, kind, num_tokens, *, hidden=200, width=88, down=None, shared=False):
    """down: the kind of that map, where it is another one."""
    experts = Experts(
        inputs.normal(NUM_EXPERTS + shared, hidden, dtype=dtype) * 0.3,
        make_stack(inputs, dtype, kind, 2 * width, hidden, 2),
        make_stack(inputs, dtype, down or kind, hidden, width, 1),
        TOP_K,
        True,
    )
    return MoeCall(
        inputs.normal(num_tokens, hidden, dtype=dtype),
        experts,
        Norm(inputs.normal(hidden, dtype=dtype), 1e-6),
        torch.zeros(num_counters(NUM_EXPERTS), dtype=torch.int32, device=inputs.device),
        shared=inputs.normal(num_tokens, hidden, dtype=dtype) if shared else None,
    )


class Case(NamedTuple):
    """A depth, and sizes in whole tiles of columns."""

    stages: int
    hidden: int
    width: int

    @property
    def sizes(self):
        return {"hidden": self.hidden, "width": self.width}


HOPPER = {
    1: Case(6, 256, 128),
    2: Case(3, 1024, 384),
    20: Case(5, 512, 256),
    40: Case(4, 256, 128),
    150: Case(4, 640, 256),
}
"""By the number of tokens: tiles of 8, 16, 32 and 64 pairs."""


def run_by_hopper(call, num_tokens):
    from oneloop_kernels.ops.moe.gpu import run

    run(call, plan_of_packed(num_tokens, shape_of(call), hopper_stages=HOPPER[num_tokens].stages))


class Made:
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
    """On a GPU, what the chosen tests of this file run compiles at once: one by one it takes minutes."""
    if kernel_device.type != "cuda":
        return
    chosen = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    made, workers = Made(kernel_device), CompileWorkers.start(COMPILE_THREADS)
    with compiling_ahead(COMPILE_THREADS, workers):
        for item in chosen:
            params = item.callspec.params
            if "kind" not in params or "num_tokens" not in params or params.get("moe") == "reference":
                continue
            num_tokens, dtype, kind = params["num_tokens"], params["half_dtype"], KINDS[params["kind"]]
            if "moe" in params:
                MOE.resolve(kernel_device, dtype, name="triton")(make_call(made, dtype, kind, num_tokens))
            else:
                call = make_call(made, dtype, kind, num_tokens, **HOPPER[num_tokens].sizes)
                run_by_hopper(call, num_tokens)
    if workers is not None:
        workers.close()


def plain_call(call):
    """With weights that somebody wrote out."""
    experts = call.experts
    gate_up, down = (
        torch.stack([stack.plain(expert) for expert in range(NUM_EXPERTS)])
        for stack in (experts.gate_up, experts.down)
    )
    return call._replace(x=call.x.clone(), experts=experts._replace(gate_up=gate_up, down=down))


def check(call, moe):
    """Against the reference in float64 of the same weights, but for tokens whose choice hangs on a rounding."""
    plain = plain_call(call)
    wide = [tensor.double() for tensor in plain.experts[:3]]
    exact = plain._replace(
        x=plain.x.double(),
        experts=plain.experts._replace(router=wide[0], gate_up=wide[1], down=wide[2]),
        norm=Norm(plain.norm.weight.double(), plain.norm.eps),
        shared=None if plain.shared is None else plain.shared.double(),
    )
    normed = rms_norm(exact.x, exact.norm.weight, exact.norm.eps)
    logits = (normed @ exact.experts.router[:NUM_EXPERTS].T).sort(descending=True).values
    sure = logits[:, TOP_K - 1] - logits[:, TOP_K] > torch.finfo(call.x.dtype).eps * logits.abs().amax(1)
    MOE.resolve(call.x.device, torch.float64, name="reference")(exact)
    moe(call)
    assert sure.float().mean() >= 0.5 or len(sure) == 1
    assert_close(call.x[sure], exact.x[sure], call.x.dtype)
    assert not call.counters.any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(moe, inputs, half_dtype, kind, num_tokens):
    check(make_call(inputs, half_dtype, KINDS[kind], num_tokens), moe)


@pytest.mark.parametrize("num_tokens", [3, 33])
def test_maps_of_two_kinds_beside_a_shared_expert(moe, inputs, half_dtype, num_tokens):
    """As in most GGUF files."""
    check(make_call(inputs, half_dtype, KINDS["q4_k"], num_tokens, down=KINDS["q6_k"], shared=True), moe)


def test_padding_is_left_alone(moe, inputs, half_dtype):
    call = make_call(inputs, half_dtype, KINDS["gptq"], 8)
    before, slots = call.x.clone(), torch.arange(5, device=inputs.device)
    moe(call._replace(slots=slots))
    assert torch.equal(call.x[5:], before[5:])
    assert not torch.equal(call.x[:5], before[:5])


@pytest.mark.parametrize("num_tokens", [2, 33])
def test_all_experts_are_chosen(inputs, kernel_device, half_dtype, num_tokens):
    call = make_call(inputs, half_dtype, KINDS["q4_0"], num_tokens, shared=True)
    call = call._replace(experts=call.experts._replace(top_k=NUM_EXPERTS))
    check(call, MOE.resolve(kernel_device, half_dtype, name="triton"))


@pytest.mark.usefixtures("products_of_tensor_cores")
@pytest.mark.parametrize("num_tokens", [20, 70])
def test_all_tokens_have_the_same_experts(inputs, kernel_device, half_dtype, num_tokens):
    """The others have none; of the 70 more than a tile holds. Where a token stands changes no bit of it."""
    call = make_call(inputs, half_dtype, KINDS["gptq"], num_tokens)
    router, moe = call.experts.router, MOE.resolve(kernel_device, half_dtype, name="triton")
    call.x.copy_(((router[1] + router[4]) * call.norm.weight.sign()).expand_as(call.x))
    statistics = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device=inputs.device)
    check(call, lambda call: moe(call._replace(statistics=statistics)))
    assert statistics.tolist() == [0, num_tokens, 0, 0, num_tokens, 0]
    assert torch.equal(call.x, call.x[:1].expand_as(call.x))


@pytest.mark.parametrize("num_tokens", [3, 33])
def test_nothing_but_padding(moe, inputs, half_dtype, num_tokens):
    call = make_call(inputs, half_dtype, KINDS["q4_k"], num_tokens, shared=True)
    before = call.x.clone()
    moe(call._replace(slots=torch.full((num_tokens,), -1, device=inputs.device)))
    moe(call._replace(slots=torch.empty(0, dtype=torch.int64, device=inputs.device)))
    assert torch.equal(call.x, before)
    assert not call.counters.any()


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("num_tokens", HOPPER)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.ordered])
def test_by_the_kernel_of_hopper(inputs, half_dtype, kind, num_tokens):
    """Of all sizes of tiles, with fewer stages than tiles and more; as often as it takes for a race to show."""
    call = make_call(inputs, half_dtype, KINDS[kind], num_tokens, **HOPPER[num_tokens].sizes)
    before, results = call.x.clone(), []
    check(call, lambda call: run_by_hopper(call, num_tokens))
    for _ in range(20):
        again = call._replace(x=before.clone())
        run_by_hopper(again, num_tokens)
        results.append(again.x)
    assert all(torch.equal(result, call.x) for result in results)


@pytest.mark.gpu
def test_what_the_kernel_of_hopper_does_not_take(inputs, half_dtype):
    for kind, hidden in (("by activation", 256), ("gptq", 200)):
        call = make_call(inputs, half_dtype, KINDS[kind], 2, hidden=hidden)
        with pytest.raises(ValueError, match="whole tiles of columns"):
            run_by_hopper(call, 2)


@pytest.mark.usefixtures("products_of_tensor_cores")
@pytest.mark.parametrize("kind", ["gptq", "q4_k"])
def test_in_the_fixed_order_a_token_alone_has_the_same_bits(
    inputs, kernel_device, half_dtype, same_bits, kind
):
    triton = MOE.resolve(kernel_device, half_dtype, name="triton")
    call = make_call(inputs, half_dtype, KINDS[kind], 70)
    before = call.x.clone()
    with fixed_order():
        triton(call)
        for first, count in ((0, 1), (17, 3), (30, 40)):
            part = call._replace(x=before[first : first + count].clone())
            triton(part)
            same_bits(part.x, call.x[first : first + count])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_stack_holds_what_was_put_into_it(inputs, half_dtype, kind):
    """Halves that do not end with a tile, as one map has them."""
    stack = make_stack(inputs, half_dtype, kind, 144, 200, 2)
    assert stack.shape == (NUM_EXPERTS, 144, 200)
    order = inputs.permutation(200) if kind.ordered else None
    halves = [make_numbers(inputs, kind, 72, 200, order) for _ in range(2)]
    before = [stack.plain(expert) for expert in range(NUM_EXPERTS)]
    for half in (1, 0):
        stack.put(3, halves[half], half)
    one = pack(joined(halves), half_dtype, halves=2)
    assert torch.equal(dequantize(stack.expert(3)), dequantize(one))
    others = [stack.plain(expert) for expert in range(NUM_EXPERTS)]
    assert all(torch.equal(others[expert], before[expert]) for expert in range(NUM_EXPERTS) if expert != 3)
    form = Form(
        kind.bits, None if kind.group_size > 200 else kind.group_size, kind.shift != "none", kind.ordered
    )
    assert stack.num_bytes == NUM_EXPERTS * form.kept_bytes(144, 200, halves=2)


def test_an_expert_of_another_kind_is_refused(inputs, half_dtype):
    stack = make_stack(inputs, half_dtype, KINDS["symmetric"], 72, 200, 1)
    for kind in ("q4_0", "gptq", "q8_0"):
        with pytest.raises(ValueError, match="expert 3 is of another kind than the others"):
            stack.put(3, make_numbers(inputs, KINDS[kind], 72, 200))


@pytest.mark.parametrize(("hidden", "combined"), [(63 * 64, True), (4096, False)])
def test_sums_are_combined_while_there_are_tickets(inputs, half_dtype, hidden, combined):
    """One for each tile of 64 results, whatever a plan's blocks are: these are of other weights."""
    call = make_call(inputs, half_dtype, KINDS["q4_0"], 1, hidden=64, width=16)
    plan = plan_of_packed(1, shape_of(call))
    for block_n in (64, 256):
        wide = replace(plan, down=replace(plan.down, block_n=block_n))
        assert combines(call._replace(x=inputs.normal(1, hidden, dtype=half_dtype)), wide) is combined


def test_plans_are_by_the_kinds_of_both_maps(inputs, half_dtype):
    names = {
        name: shape_of(make_call(inputs, half_dtype, KINDS[name], 1, down=KINDS[down])).weights
        for name, down in (("gptq", "gptq"), ("q4_k", "q6_k"), ("by activation", "by activation"))
    }
    assert names == {"gptq": "w4g128", "q4_k": "w4g32+w6g16", "by activation": "w4g32-ordered"}
    for weights in (*names.values(), "w4g32+plain"):
        shape = Shape(num_experts=128, top_k=8, hidden=2048, width=768, weights=weights)
        counts = (1, 32, 33, 2048, 8192)
        chosen = [plan_for(inputs.device, half_dtype, count, shape) for count in counts]
        assert [plan.block_m for plan in chosen] == [16, 16, 16, 64, 64]
        assert [plan.combined for plan in chosen] == [True, True, False, False, False]
        assert len({plan_for(inputs.device, half_dtype, count, shape, fixed=True) for count in counts}) == 1
