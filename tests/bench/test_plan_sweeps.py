"""Sweeps of kernels' plans, with a clock that is a formula: what is tried, what is found, what is written."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from oneloop_bench.kernels import dense_plans, fp8_chain, moe, moe_sweep, packed_linear, plan_text
from oneloop_bench.kernels import linear as plain
from oneloop_bench.kernels.moe_sweep import Case, Trial
from oneloop_kernels.ops.fp8_linear import plans as fp8_plans
from oneloop_kernels.ops.linear import plans as linear_plans
from oneloop_kernels.ops.moe.plans import FILES, MoePlan, ProductPlan, Shape, _plan_of
from oneloop_kernels.ops.packed_linear import plans as packed_plans

SWEPT = [
    Case(model, moe.SHAPES[model], tokens)
    for model in ("mixtral8x7b", "qwen15moe", "qwen57ba14b")
    for tokens in moe.SWEPT_TOKENS
]


class Formula:
    """A clock: the fewer columns a program has, the faster, unless that is impossible."""

    def __init__(self, impossible=lambda trial: False):
        self.impossible = impossible
        self.compiled, self.timed = [], []

    def compile(self, trials):
        self.compiled.append(list(trials))

    def us(self, trial):
        assert trial in self.compiled[-1], "nothing is compiled while it is timed"
        self.timed.append(trial)
        if self.impossible(trial):
            return math.inf
        plan = trial.plan
        products = [plan.gate_up, plan.down] if trial.part is None else [getattr(plan, trial.part)]
        return (
            sum(one.block_n + one.num_stages / 10 for one in products) - plan.together - plan.block_m / 1000
        )


def kernels_of(trials):
    """As many kernels of products as are compiled, for each shape."""
    return {
        shape: len({
            (trial.plan if trial.part is None else getattr(trial.plan, trial.part), trial.part, trial.plan.block_m,
             trial.case.num_tokens <= 32)
            for trial in trials
            if trial.case.shape == shape
        })
        for shape in {trial.case.shape for trial in trials}
    }  # fmt: skip


def test_a_sweep_is_bounded():
    """Two rounds; on 15 CPUs, two seconds a kernel, and a tenth for each time: three shapes in a minute and a half."""
    clock = Formula()
    found = moe_sweep.sweep(clock, SWEPT)
    assert set(found) == set(SWEPT)
    assert len(clock.compiled) == 2
    first, second = (kernels_of(trials) for trials in clock.compiled)
    assert sum(first.values()) + sum(second.values()) <= 250
    assert len(clock.timed) <= 350
    for case in SWEPT:
        tried = [trial for trial in clock.timed if trial.case == case]
        assert len({trial.plan.gate_up for trial in tried if trial.part == "gate_up"}) >= 3
        assert len(tried) <= 40


@pytest.mark.parametrize("case", SWEPT, ids=lambda case: f"{case.model}-{case.num_tokens}")
def test_what_is_tried_can_run(case):
    for trial in moe_sweep.first_round(case):
        product = getattr(trial.plan, trial.part)
        in_size = case.shape.hidden if trial.part == "gate_up" else case.shape.width
        halves = 2 if trial.part == "gate_up" else 1
        assert in_size % product.block_k == 0
        height = trial.plan.block_m
        columns = halves * product.block_n if product.kind != "grouped" else product.block_n
        assert (columns + height) * product.block_k * 2 * product.num_stages <= 227 << 10
        assert product.kind == "weights" or case.num_tokens > 32


def test_the_best_of_what_runs_is_found():
    case = Case("mixtral8x7b", moe.SHAPES["mixtral8x7b"], 8)
    plan = moe_sweep.sweep(Formula(), [case])[case]
    assert (plan.gate_up.block_n, plan.down.block_n) == (16, 32)
    assert plan.together
    narrow_fails = Formula(
        lambda trial: trial.part is not None and getattr(trial.plan, trial.part).block_n < 64
    )
    plan = moe_sweep.sweep(narrow_fails, [case])[case]
    assert (plan.gate_up.block_n, plan.down.block_n) == (64, 64)
    together_fails = Formula(lambda trial: trial.part is None and trial.plan.together)
    assert not moe_sweep.sweep(together_fails, [case])[case].together
    assert not moe_sweep.sweep(Formula(lambda trial: True), [case])


def test_plans_are_written_over_those_of_the_same_tokens(tmp_path):
    """And read as they are."""
    path = tmp_path / FILES["NVIDIA H200"]
    other, own = Shape(4, 2, 64, 64), Shape(8, 2, 4096, 14336)
    weights = ProductPlan("weights", 64, 128, 3)
    first, second = MoePlan(8, weights, weights), MoePlan(16, weights, weights, combined=True)
    third = MoePlan(
        64, ProductPlan("grouped", 128, 64, 4), ProductPlan("tokens", 256, 64, 3, 8, 512), together=True
    )

    def write(*found):
        moe_sweep.write(
            path, moe_sweep.entries({Case("", shape, tokens): plan for shape, tokens, plan in found})
        )

    write((other, 1, first), (own, 8, first), (own, 512, first))
    write((own, 1, first), (own, 8, second), (own, 2048, third))
    content = json.loads(path.read_text())
    assert [entry["shape"] for entry in content] == [
        {"num_experts": 4, "top_k": 2, "hidden": 64, "width": 64},
        {"num_experts": 8, "top_k": 2, "hidden": 4096, "width": 14336},
    ]
    read = [{plan["tokens"]: _plan_of(plan) for plan in entry["plans"]} for entry in content]
    assert read == [{1: first}, {1: first, 8: second, 512: first, 2048: third}]
    assert list(read[1]) == sorted(read[1])
    assert "prefetch" not in content[1]["plans"][0]["down"]


def test_long_launches_are_timed_a_few_times():
    plan = MoePlan(8, ProductPlan("weights", 64, 128, 3), ProductPlan("weights", 64, 128, 3))
    for tokens, launches in ((1, 12), (8192, 3)):
        trial = Trial(Case("", moe.SHAPES["qwen15moe"], tokens), plan)
        assert moe_sweep.effort_of(trial, 4.3e12, 7.5e14).launches == launches


class Meta:
    """A bench whose tensors have shapes and no memory, and whose times are a formula of the candidates' names."""

    device = torch.device("meta")

    def __init__(self, worth):
        self.worth, self.tried, self.rows = worth, [], []

    def wanted(self, name):
        return True

    def sets(self, make, *, num_bytes):
        return [make()]

    def best(self, name, candidates, sets, *, num_bytes):
        self.tried.append(list(candidates))
        self.rows.append(SimpleNamespace(name=name, us=1.0))
        return min(candidates, key=lambda key: self.worth(name, key))


def test_packed_plans_are_found(monkeypatch):
    monkeypatch.setattr(packed_linear, "compile_all", lambda *args: None)
    monkeypatch.setattr(packed_linear, "num_sms", lambda device: 132)
    monkeypatch.setattr(packed_linear, "surroundings", lambda *args: None)
    bench = Meta(lambda name, key: "residents 2" not in key or "tiles 2" not in key)
    found = dense_plans.packed_found(bench, plain.MODELS["llama8b"][:4], (4, 64, 128))
    assert set(found) == set(packed_plans.TUNED[dense_plans.CARD])
    assert max(map(len, bench.tried)) <= 12
    assert sum(map(len, bench.tried)) <= 110
    for plans in found.values():
        assert list(plans) == [4, 64, 128]
        assert all((plan.residents, plan.column_tiles) == (2, 2) for plan in plans.values())


def test_plans_of_8_bits_are_found(monkeypatch):
    timed = []

    def time_of(layers, rows, plans):
        timed.append(plans)
        return sum(plan.num_stages if plan else 100 for plan in plans.values())

    monkeypatch.setattr(fp8_chain, "time_of", time_of)
    monkeypatch.setattr(fp8_chain, "compile_all", lambda *args: None)
    monkeypatch.setattr(fp8_chain, "plan_of", planned)
    found = dense_plans.fp8_found([], (8, 16, 32, 64))
    assert list(found) == list(fp8_plans.TUNED[dense_plans.CARD])
    assert len(timed) <= 250
    for name, plans in zip(fp8_chain.MAPS, found.values(), strict=True):
        for rows, plan in plans.items():
            several = dense_plans.fp8_candidates(name, rows)
            assert planned(name, rows) in several
            assert plan.num_stages == min(one.num_stages for one in several if one)


def planned(name, rows):
    one = fp8_chain.MAPS[name]
    choices = fp8_plans.TUNED[dense_plans.CARD][one.out_size, one.in_size, one.gated]
    return next((plan for most, plan in choices if rows <= most), None)


def test_a_table_is_text_as_it_stands_in_the_code():
    tuned = {
        (64, 128, True): ((8, linear_plans.DensePlan((64,), 8)), (16, None)),
        (1, 2, False): ((1, None),),
    }
    found = {(64, 128, True): {4: linear_plans.StreamPlan(64, 256, 5, programs=192), 16: None}}
    assert plan_text.table(tuned, found).splitlines() == [
        "        (64, 128, True): (",
        "            (4, StreamPlan(64, 256, 5, programs=192)),",
        "            (8, DensePlan((64,), 8)),",
        "            (16, None),",
        "        ),",
        "        (1, 2, False): (",
        "            (1, None),",
        "        ),",
    ]


def test_text_says_what_is_not_as_by_default():
    plan = packed_plans.StreamPlan(2, 4, residents=3, slices=True)
    assert plan_text.literal(plan) == "StreamPlan(2, 4, residents=3, slices=True)"
    assert plan_text.literal(linear_plans.DensePlan((64, 32), 7)) == "DensePlan((64, 32), 7)"
    assert plan_text.literal(None) == "None"


def test_what_was_found_stands_among_what_is_there():
    assert plan_text.merged(((8, "a"), (16, "b"), (64, "c")), {4: "d", 16: "e"}) == (
        (4, "d"),
        (8, "a"),
        (16, "e"),
        (64, "c"),
    )
    assert plan_text.merged(((8, "a"), (16, "b")), {16: "a", 64: None}) == ((16, "a"), (64, None))
    assert plan_text.merged((), {1: "a"}) == ((1, "a"),)
