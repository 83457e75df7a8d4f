"""Mixtures of experts: every implementation against the definition in float64, token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oneloop_kernels.ops.linear import Norm
from oneloop_kernels.ops.moe import MOE, NUM_TICKETS, Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.plans import (
    FILES,
    MoePlan,
    ProductPlan,
    Shape,
    plan_by_rule,
    plan_for,
    read_plans,
    route_plan,
)
from oneloop_kernels.ops.moe.reference import route
from oneloop_kernels.ops.rms_norm.reference import rms_norm
from oneloop_kernels.testing import assert_close

WIDE_WEIGHTS = ProductPlan("weights", block_n=32, block_k=32, num_stages=2)
WIDE_TOKENS = ProductPlan("tokens", block_n=64, block_k=32, num_stages=2)
PLANS = {
    "weights wide": MoePlan(block_m=16, gate_up=WIDE_WEIGHTS, down=replace(WIDE_WEIGHTS, block_n=64)),
    "tokens wide": MoePlan(block_m=64, gate_up=WIDE_TOKENS, down=WIDE_TOKENS),
    "combined": MoePlan(block_m=16, gate_up=WIDE_WEIGHTS, down=WIDE_WEIGHTS, combined=True),
    "prefetch": MoePlan(
        block_m=16, gate_up=WIDE_WEIGHTS, down=replace(WIDE_WEIGHTS, block_n=64, prefetch=64)
    ),
    "together": MoePlan(block_m=16, gate_up=WIDE_WEIGHTS, down=WIDE_WEIGHTS, combined=True, together=True),
    "together ahead": MoePlan(
        block_m=64, gate_up=WIDE_TOKENS, down=replace(WIDE_WEIGHTS, prefetch=64), together=True
    ),
    "together, down by tokens": MoePlan(
        block_m=64, gate_up=WIDE_WEIGHTS, down=WIDE_TOKENS, combined=True, together=True
    ),
    "together, both by tokens": MoePlan(
        block_m=64, gate_up=WIDE_TOKENS, down=replace(WIDE_TOKENS, prefetch=64), together=True
    ),
}
HIDDEN, WIDTH = 96, 40


@pytest.fixture(params=["own", "reference", "triton"])
def moe(request, kernel_device, kernel_dtype):
    """Implementations; own: what the family takes by itself (on a CPU that is for float32)."""
    name = None if request.param == "own" else request.param
    return MOE.resolve(kernel_device, kernel_dtype, name=name)


def make_call(
    inputs, dtype, num_tokens, *,
    num_experts=12, top_k=3, renormalised=True, shared=False, gate=False, hidden=HIDDEN, width=WIDTH,
):  # fmt: skip
    """Weights such that outputs are about as large as x."""
    experts = Experts(
        inputs.normal(num_experts + gate, hidden, dtype=dtype) * 0.3,
        inputs.normal(num_experts, 2 * width, hidden, dtype=dtype) * hidden**-0.5,
        inputs.normal(num_experts, hidden, width, dtype=dtype) * width**-0.5,
        top_k,
        renormalised,
    )
    return MoeCall(
        inputs.normal(num_tokens, hidden, dtype=dtype),
        experts,
        Norm(inputs.normal(hidden, dtype=dtype), 1e-6),
        torch.zeros(num_counters(num_experts), dtype=torch.int32, device=inputs.device),
        shared=inputs.normal(num_tokens, hidden, dtype=dtype) if shared else None,
        statistics=torch.zeros(num_experts, dtype=torch.int64, device=inputs.device),
    )


def expected_of(call):
    """x and statistics behind the call, in float64, and for which tokens rounding cannot have chosen other experts.

    The norm is rounded as the models round it, since experts hang on it; by the last bit it may still differ.
    """
    wide = call.x.cpu().double()
    experts, out = call.experts, wide.clone()
    sure = torch.ones(len(wide), dtype=torch.bool)
    counts = torch.zeros(experts.num_experts, dtype=torch.int64)
    weight, dtype = call.norm.weight.cpu(), call.x.dtype
    router, gate_up, down = (part.cpu().double() for part in experts[:3])
    shared = None if call.shared is None else call.shared.cpu().double()
    slots = None if call.slots is None else call.slots.tolist()
    for token, row in enumerate(wide):
        if slots is not None and (token >= len(slots) or slots[token] < 0):
            continue
        normed = (row / (row.square().mean() + call.norm.eps).sqrt()).to(dtype)
        hidden = (normed * weight).double()
        logits = router @ hidden
        scores = logits[: experts.num_experts].softmax(0)
        chosen = sorted(range(experts.num_experts), key=lambda expert: (-scores[expert], expert))[
            : experts.top_k
        ]
        if experts.top_k < experts.num_experts and logits.any():
            gap = (
                logits[chosen[-1]] - logits[: experts.num_experts].sort(descending=True).values[experts.top_k]
            )
            sure[token] = gap > max(torch.finfo(dtype).eps / 4, 1e-5) * logits.abs().max()
        total = sum(scores[expert] for expert in chosen) if experts.renormalised else 1.0
        for expert in chosen:
            counts[expert] += 1
            gate, up = (gate_up[expert] @ hidden).chunk(2)
            inner = gate * gate.sigmoid() * up
            out[token] += scores[expert] / total * (down[expert] @ inner)
        if shared is not None:
            factor = logits[experts.num_experts :].sigmoid() if experts.has_shared_gate else 1.0
            out[token] += factor * shared[token]
    return out, counts, sure


def check(call, compute):
    expected, counts, sure = expected_of(call)
    compute(call)
    assert call.statistics.sum() == counts.sum()
    assert (call.statistics.cpu() - counts).abs().sum() <= 2 * (~sure).sum()
    assert not call.counters.any()
    assert sure.float().mean() >= 0.5 or len(sure) == 1  # a token alone is unsure now and then
    assert_close(call.x.cpu()[sure], expected[sure], call.x.dtype)


@pytest.mark.parametrize("num_tokens", [1, 5, 32, 33, 50])
def test_few_and_many_tokens(moe, inputs, kernel_dtype, num_tokens):
    check(make_call(inputs, kernel_dtype, num_tokens), moe)


@pytest.mark.parametrize("num_tokens", [520, 2050])
def test_routing_of_more_tokens(inputs, kernel_dtype, num_tokens):
    """With all of the hidden size in a program: what comes behind it does not hang on that."""
    from oneloop_kernels.ops.moe import gpu

    call = make_call(inputs, kernel_dtype, num_tokens, hidden=32, width=16, num_experts=40, top_k=2)
    routed = gpu.route(call, PLANS["tokens wide"])
    expected = route(rms_norm(call.x, call.norm.weight, call.norm.eps), call.experts)
    ids, weights = routed.ids.view(num_tokens, 2), routed.weights.view(num_tokens, 2)
    sure = (expected.weights[:, 0] - expected.weights[:, 1]).abs() > 0.01
    same = (ids == expected.ids).all(1)
    assert same[sure].float().mean() > 0.98
    torch.testing.assert_close(weights[same], expected.weights[same], atol=0.01, rtol=0.05)
    assert pairs_by_tile(routed, num_tokens, 40, ids.flatten()) == set(range(2 * num_tokens))
    assert torch.equal(call.statistics, ids.flatten().bincount(minlength=40))
    assert not call.counters.any()


def pairs_by_tile(routed, num_tokens, num_experts, ids):
    """All that tiles have, each once; rows follow one another, and each tile's pairs are of its expert."""
    table = routed.tiles[4 : 4 + 4 * routed.tiles[0]].view(-1, 4).tolist()
    found, row = [], 0
    for expert, first, end, place in table:
        assert first == row
        assert place // num_tokens == expert < num_experts
        pairs = routed.bins[place : place + end - first].tolist()
        assert {int(ids[pair]) for pair in pairs} == {expert}
        found, row = found + pairs, end
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("num_tokens", [4, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"renormalised": False},
        {"shared": True},
        {"shared": True, "gate": True, "renormalised": False},
        {"top_k": 1},
        {"num_experts": 4, "top_k": 4},
        {"num_experts": 33, "top_k": 5, "shared": True, "gate": True},
    ],
    ids=str,
)
def test_variants(moe, inputs, kernel_dtype, num_tokens, options):
    call = make_call(inputs, kernel_dtype, num_tokens, **options)
    check(call, moe)


@pytest.mark.parametrize(("num_live", "num_tokens"), [(5, 8), (0, 2), (35, 40)])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "short"])
def test_padding_is_left_alone(moe, inputs, kernel_dtype, num_live, num_tokens, marked):
    """Rows of padding keep their values, whatever these are, and are sent nowhere."""
    call = make_call(inputs, kernel_dtype, num_tokens, shared=True, gate=True)
    slots = torch.arange(num_tokens, device=inputs.device)
    call = call._replace(slots=slots.masked_fill(slots >= num_live, -1) if marked else slots[:num_live])
    before = call.x.clone()
    check(call, moe)
    assert torch.equal(call.x[num_live:], before[num_live:])


@pytest.mark.parametrize("num_tokens", [3, 50])
def test_of_equal_logits_the_lower_index_is_chosen(moe, inputs, kernel_dtype, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens, num_experts=8, top_k=3)
    call.experts.router[:] = 0
    check(call, moe)
    assert call.statistics.tolist() == [num_tokens] * 3 + [0] * 5


@pytest.mark.parametrize("num_tokens", [20, 90])
def test_all_tokens_on_one_expert(moe, inputs, kernel_dtype, num_tokens):
    """It has several tiles, and all others have no tokens."""
    call = make_call(inputs, kernel_dtype, num_tokens, top_k=1)
    call.norm.weight.abs_()
    call.x.abs_()
    call.experts.router.abs_().neg_()
    call.experts.router[7].neg_()
    check(call, moe)
    assert call.statistics[7] == num_tokens


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_what_is_no_number_stays_with_its_token(inputs, kernel_device, kernel_dtype, num_tokens):
    call = make_call(inputs, kernel_dtype, num_tokens)
    expected, _, sure = expected_of(call)
    call.x[1] = float("nan")
    MOE.resolve(kernel_device, kernel_dtype, name="triton")(call)
    others = sure & (torch.arange(num_tokens) != 1)
    assert_close(call.x.cpu()[others], expected[others], kernel_dtype)
    assert call.x[1].isnan().all()
    assert call.statistics.sum() == 3 * num_tokens


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_tokens", [1, 9, 75])
def test_plans(inputs, kernel_dtype, name, num_tokens):
    from oneloop_kernels.ops.moe.gpu import run

    call = make_call(inputs, kernel_dtype, num_tokens, shared=True, gate=True)
    slots = torch.arange(num_tokens, device=inputs.device)
    call = call._replace(slots=slots.masked_fill(slots >= max(1, num_tokens - 3), -1))
    check(call, lambda call: run(call, PLANS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("widths", [(64, 128), (128, 256)], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "width"), [(33, HIDDEN, WIDTH), (300, 256, 128), (1500, 128, 192)]
)
def test_grouped_products(inputs, kernel_device, kernel_dtype, block_m, widths, num_tokens, hidden, width):
    """Rows gathered where their tokens are, tiles that are not full, and more tiles than programs."""
    from oneloop_kernels.ops.linear.plans import can_stream
    from oneloop_kernels.ops.moe.gpu import run

    assert can_stream(kernel_device), "the GPU tests need a Hopper GPU"
    call = make_call(inputs, kernel_dtype, num_tokens, shared=True, gate=True, hidden=hidden, width=width)
    slots = torch.arange(num_tokens, device=inputs.device)
    call = call._replace(slots=slots.masked_fill(slots >= num_tokens - 3, -1))
    products = (ProductPlan("grouped", block_n, 64, 3) for block_n in widths)
    plan = MoePlan(block_m, *products)
    check(call, lambda call: run(call, plan))


@pytest.mark.parametrize("num_tokens", [6, 45])
def test_a_token_alone_and_among_others(inputs, kernel_dtype, num_tokens):
    """By the same plan, its result does not hang on who else is there, or where it stands."""
    from oneloop_kernels.ops.moe.gpu import run

    call = make_call(inputs, kernel_dtype, num_tokens)
    turned = call._replace(x=call.x.flip(0).contiguous())
    for one in (call, turned):
        run(one, PLANS["weights wide"])
    assert torch.equal(turned.x.flip(0), call.x)


def test_counters_are_checked(inputs):
    from oneloop_kernels.ops.moe.gpu import moe

    call = make_call(inputs, torch.float16, 2)
    with pytest.raises(ValueError, match="counters"):
        moe(call._replace(counters=call.counters[:4]))


@pytest.mark.parametrize("file", FILES.values())
def test_tuned_plans_are_well_formed(file):
    """They ascend, and tiles are what the kernels take: powers of two, blocks that the inner sizes are multiples of."""
    for shape, plans in read_plans(file).items():
        tokens = [most for most, _ in plans]
        assert tokens == sorted(set(tokens))
        for _, plan in plans:
            for product, inner in ((plan.gate_up, shape.hidden), (plan.down, shape.width)):
                for size in (plan.block_m, product.block_n, product.block_k):
                    assert size.bit_count() == 1
                assert inner % product.block_k == 0


def test_the_rule_and_the_table(monkeypatch):
    """A tuned shape has its plans for the card alone; beyond the last, and for other types, the rule counts."""
    from oneloop_kernels.ops.moe import plans

    shape = Shape(num_experts=16, top_k=2, hidden=64, width=32)
    tuned = ((8, PLANS["prefetch"]), (64, PLANS["tokens wide"]))
    monkeypatch.setattr(plans, "read_plans", lambda _name: {shape: tuned})
    monkeypatch.setattr(plans, "card_name", lambda _device: "NVIDIA H200 NVL")
    plans._plan_for.cache_clear()
    device = torch.device("cpu")
    chosen = [plan_for(device, torch.bfloat16, count, shape) for count in (1, 8, 9, 64)]
    assert chosen == [tuned[0][1], tuned[0][1], tuned[1][1], tuned[1][1]]
    for dtype, count in ((torch.bfloat16, 65), (torch.float32, 8)):
        assert plan_for(device, dtype, count, shape) == plan_by_rule(dtype.itemsize, count, shape)
    plans._plan_for.cache_clear()


def test_tickets_suffice():
    """Of the routing's blocks; see MoeCall.counters."""
    for num_tokens in range(1, 2000):
        cut = route_plan(num_tokens, 2048, 128, 2)
        assert cut.splits == 1 or -(-num_tokens // cut.tokens) < NUM_TICKETS
