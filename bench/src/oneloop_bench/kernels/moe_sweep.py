"""Plans of experts: a bounded number of candidates for each number of tokens, compiled all at once, then timed.

Two rounds. In the first gate_up and down are timed by themselves, for one or two heights of a tile; in the second the
best of them in the whole block, with what only that shows: both products by one kernel, the sum in down's. What is
compiled for a round is compiled for all numbers of tokens together, on all CPUs but one.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels import moe
from oneloop_bench.kernels.timing import Effort, num_sets, time_launches
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import INTERPRETED, compiling_ahead
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.moe.gpu import run
from oneloop_kernels.ops.moe.plans import MAX_FEW, MoePlan, ProductPlan, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from oneloop_bench.kernels.moe import Inputs, Prepared
    from oneloop_bench.kernels.timing import KernelBench
    from oneloop_kernels.ops.moe import Experts

PARTS: Final = ("gate_up", "down")
MANY: Final = 48
"""Mean tokens of an expert from which tokens are tried as the wide side."""
MAX_SHARED_BYTES: Final = 220 << 10
MAX_STAGES: Final = 7
MAX_LAYERS: Final = 3
"""With weights of their own, so that a few tokens' are not found in the cache."""
ENOUGH: Final = 2e-4
"""Seconds of launches beyond which a graph needs no more of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a plan is sought for."""

    model: str
    shape: Shape
    num_tokens: int

    @property
    def mean(self) -> float:
        """Tokens of an expert."""
        return self.num_tokens * self.shape.top_k / self.shape.num_experts


@dataclass(frozen=True, slots=True)
class Trial:
    """One launch that is timed. part: None: the whole block."""

    case: Case
    plan: MoePlan
    part: str | None = None


class Clock(Protocol):
    """How long trials take."""

    def compile(self, trials: Sequence[Trial]) -> None:
        """All that they launch, ahead of their being timed."""

    def us(self, trial: Trial) -> float:
        """Of one launch; without an end where a kernel does not run."""


def tile_heights(case: Case) -> list[int]:
    """block_m worth a try: of few tokens all have room; else what most experts fit into, and perhaps the next."""
    if case.num_tokens <= MAX_FEW:
        return [max(8, 1 << (case.num_tokens - 1).bit_length())]
    if case.mean >= MANY:
        return [64] if case.mean < 96 else [128] if case.mean > 384 else [64, 128]
    fitting = max(16, 1 << math.ceil(math.log2(case.mean + 2 * math.sqrt(case.mean))))
    return sorted({fitting, max(16, fitting // 2)})


def candidates(case: Case, block_m: int, part: str) -> Iterator[ProductPlan]:
    """Six at most, of kinds of which one has been the best of a wider sweep somewhere."""
    gated = part == "gate_up"
    if case.shape.weights != "plain":
        yield from _candidates_of_8_bits(case, block_m, gated=gated)
        return
    if case.mean >= MANY:
        yield from (ProductPlan("grouped", 128 if gated else 256, 64, stages) for stages in (3, 4))
        for block_n, stages, warps in ((128, 3, 8), (256, 3, 8), (128, 3, 4)):
            columns = (2 if gated else 1) * block_n
            fits = 32 <= block_m * columns // (32 * warps) <= 256 and columns <= 256
            if fits and (columns + block_m) * 64 * 2 * stages <= MAX_SHARED_BYTES:
                yield ProductPlan("tokens", block_n, 64, stages, warps)
        if case.mean < 2 * MANY:
            yield ProductPlan("weights", 128 if gated else 256, 64, 5, 8)
        return
    in_size = case.shape.hidden if gated else case.shape.width
    ways = [(64, 2), (64, 4), (128, 1), (128, 2)]  # columns, programs that share a multiprocessor
    ways.append((32, 3) if case.num_tokens <= 8 else (256, 1))
    for columns, programs in ways:
        block_k = 64 if columns == 256 else 128
        stages = min(MAX_SHARED_BYTES // programs // ((columns + block_m) * block_k * 2), MAX_STAGES)
        stages = min(stages, in_size // block_k + 1)
        if stages >= 2 and in_size % block_k == 0:
            warps = 8 if columns * block_m > 8192 else 4
            yield ProductPlan("weights", columns // (2 if gated else 1), block_k, stages, warps)


def _candidates_of_8_bits(case: Case, block_m: int, *, gated: bool) -> Iterator[ProductPlan]:
    """The same, of which none has been measured yet. Up to 8 tokens each program may quantise x for itself."""
    halves = 2 if gated else 1
    if case.mean >= MANY:
        for columns in (128,) if case.shape.weights == "fp8-block" else (128, 256):
            stages = min(MAX_SHARED_BYTES // ((columns + block_m) * BLOCK), MAX_STAGES)
            yield ProductPlan("grouped", columns // halves, BLOCK, stages)
        yield from (ProductPlan("tokens", 128 // halves, BLOCK, stages, 8) for stages in (3, 4))
        return
    inside = (True, False) if case.num_tokens <= 8 else (False,)
    for (columns, programs), quantizes in itertools.product(((64, 2), (64, 4), (128, 2)), inside):
        stages = min(MAX_SHARED_BYTES // programs // ((columns + block_m) * BLOCK), MAX_STAGES)
        warps = 8 if columns * block_m > 8192 else 4
        yield ProductPlan("weights", columns // halves, BLOCK, stages, warps, quantizes=quantizes)


def first_round(case: Case) -> list[Trial]:
    """Each product by itself, beside the first candidate for the other."""
    trials = []
    for block_m in tile_heights(case):
        several = {part: list(dict.fromkeys(candidates(case, block_m, part))) for part in PARTS}
        start = MoePlan(block_m, several["gate_up"][0], several["down"][0])
        trials += [
            Trial(case, with_product(start, part, product), part)
            for part in PARTS
            for product in several[part]
        ]
    return trials


def second_round(times: Mapping[Trial, float]) -> list[Trial]:
    """Of one case: whole plans of the best products for each height."""
    trials = []
    for block_m in dict.fromkeys(trial.plan.block_m for trial in times):
        best = {}
        for part in PARTS:
            own = [one for one in times if one.part == part and one.plan.block_m == block_m]
            best[part] = min(own, key=lambda one: times[one])
        if all(math.isfinite(times[one]) for one in best.values()):
            case = best["down"].case
            plan = with_product(best["gate_up"].plan, "down", best["down"].plan.down)
            joined = case.shape.weights == "plain"
            trials += [
                Trial(case, one) for one in whole_plans(plan, case.num_tokens) if joined or not one.together
            ]
    return trials


def whole_plans(plan: MoePlan, num_tokens: int) -> Iterator[MoePlan]:
    """Four at most."""
    yield plan
    if plan.gate_up.kind == "grouped" or plan.down.kind == "grouped":
        return
    yield replace(plan, together=True)
    if num_tokens <= MAX_FEW:
        yield replace(plan, combined=True)
        yield replace(plan, combined=True, together=True)


def with_product(plan: MoePlan, part: str, product: ProductPlan) -> MoePlan:
    """The plan with another one for "gate_up" or "down"."""
    return replace(plan, gate_up=product) if part == "gate_up" else replace(plan, down=product)


def sweep(clock: Clock, cases: Sequence[Case]) -> dict[Case, MoePlan]:
    """The best plan of each case for which one runs."""
    firsts = _timed(clock, [trial for case in cases for trial in first_round(case)])
    for case, times in firsts.items():
        for part in PARTS:
            _tell(case, part, {trial: us for trial, us in times.items() if trial.part == part})
    seconds = _timed(clock, [trial for times in firsts.values() for trial in second_round(times)])
    found = {}
    for case, times in seconds.items():
        _tell(case, "whole", times)
        best = min(times, key=lambda one: times[one])
        if math.isfinite(times[best]):
            found[case] = best.plan
    return found


def _timed(clock: Clock, trials: Sequence[Trial]) -> dict[Case, dict[Trial, float]]:
    begin = time.perf_counter()
    clock.compile(trials)
    compiled = time.perf_counter()
    found: dict[Case, dict[Trial, float]] = defaultdict(dict)
    for trial in trials:
        found[trial.case][trial] = clock.us(trial)
    took = f"compiled in {compiled - begin:.1f} s, timed in {time.perf_counter() - compiled:.1f} s"
    print(f"{len(trials)} trials {took}", flush=True)
    return found


def _tell(case: Case, part: str, times: Mapping[Trial, float]) -> None:
    """The three best and the worst."""
    ranking = sorted(times, key=lambda trial: times[trial])
    shown = [f"{times[trial]:.1f} {short(trial)}" for trial in dict.fromkeys((*ranking[:3], ranking[-1]))]
    print(f"  {case.model} {case.num_tokens:04d} {part}: " + " | ".join(shown), flush=True)


def short(trial: Trial) -> str:
    """A name for the table."""
    plan = trial.plan
    products = [getattr(plan, trial.part)] if trial.part else [plan.gate_up, plan.down]
    named = " ".join(
        f"{one.kind[0].upper()}{one.block_n}x{one.block_k}/{one.num_stages}w{one.num_warps}{'q' * one.quantizes}"
        for one in products
    )
    rest = "" if trial.part else f" t{plan.together:d}c{plan.combined:d}"
    return f"m{plan.block_m} {named}{rest}"


def entries(found: Mapping[Case, MoePlan]) -> list[dict[str, object]]:
    """What belongs into a file of configs."""
    by_shape: dict[Shape, list[dict[str, object]]] = defaultdict(list)
    for case, plan in found.items():
        by_shape[case.shape].append({"tokens": case.num_tokens, **_entry(plan)})
    return [{"shape": _entry(shape), "plans": plans} for shape, plans in by_shape.items()]


def _entry(plan: MoePlan | ProductPlan | Shape) -> dict[str, object]:
    """Without what is as by default."""
    values = ((one, getattr(plan, one.name)) for one in fields(plan))
    return {
        one.name: _entry(value) if isinstance(value, ProductPlan) else value
        for one, value in values
        if value != one.default or one.name == "num_warps"
    }


def write(path: Path, tuned: Iterable[Mapping[str, Any]]) -> None:
    """Into a file of configs, over what is there for the same shapes and numbers of tokens; all else stays."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for entry in tuned:
        there = next((one for one in content if one["shape"] == entry["shape"]), None)
        if there is None:
            content.append({"shape": entry["shape"], "plans": []})
            there = content[-1]
        plans = {plan["tokens"]: plan for plan in (*there["plans"], *entry["plans"])}
        there["plans"] = [plans[tokens] for tokens in sorted(plans)]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


class CardClock:
    """By graphs on the bench's device. To be used as a context: it has processes that compile."""

    def __init__(self, bench: KernelBench) -> None:
        self._bench = bench
        self._experts: dict[Shape, list[Experts]] = {}
        self._inputs: dict[Case, list[Inputs]] = {}
        self._prepared: dict[tuple[Case, int], list[Prepared]] = {}
        self._opened = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._opened and self._workers is not None:
            self._workers.close()

    @cached_property
    def _workers(self) -> CompileWorkers | None:
        self._opened = True
        return CompileWorkers.start(max(1, usable_cpus() - 1))

    def compile(self, trials: Sequence[Trial]) -> None:
        """See Clock. One that does not compile says so when it is timed."""
        if self._bench.smoke or INTERPRETED:
            return
        with compiling_ahead(max(1, usable_cpus() - 1), self._workers):
            for trial in trials:
                inputs = self._sets(trial.case)[0]
                try:
                    prepared = moe.prepare(inputs, trial.plan)
                    self._launch(trial)(prepared)
                except Exception as error:  # whatever the compiler says: the other candidates go on
                    print(f"  {short(trial)} fails: {_first_line(error)}", flush=True)

    def us(self, trial: Trial) -> float:
        """See Clock."""
        try:
            sets = self._ready(trial)
            effort = effort_of(trial, self._bench.ceilings.bandwidth, self._bench.ceilings.bf16)
            return time_launches(self._launch(trial), sets, smoke=self._bench.smoke, effort=effort).us
        except Exception as error:  # whatever the compiler says: the other candidates go on
            print(f"  {trial.case.model} {short(trial)} fails: {_first_line(error)}", flush=True)
            return math.inf

    def _launch(self, trial: Trial) -> Any:
        if trial.part is None:
            return lambda one: run(one.inputs.call, trial.plan)
        return moe.parts_of(trial.plan)[trial.part]

    def _sets(self, case: Case) -> list[Inputs]:
        if case not in self._inputs:
            self._inputs[case] = [
                moe.make_inputs(case.shape, case.num_tokens, self._bench.device, experts)
                for experts in self._layers(case.shape)
            ]
        return self._inputs[case]

    def _layers(self, shape: Shape) -> list[Experts]:
        if shape not in self._experts:
            number, expert_bytes = 1, 3 * moe.item_bytes(shape) * shape.hidden * shape.width
            if not self._bench.smoke:
                number = min(MAX_LAYERS, num_sets(expert_bytes * shape.top_k))
            self._experts[shape] = [moe.make_experts(shape, self._bench.device) for _ in range(number)]
        return self._experts[shape]

    def _ready(self, trial: Trial) -> list[Prepared]:
        """Where the kernels before a product have run; they leave the same for all plans of a height."""
        key = trial.case, trial.plan.block_m
        if key not in self._prepared:
            for case, height in list(self._prepared):
                if (case, height) != key:
                    del self._prepared[case, height]
            self._prepared[key] = [moe.prepare(one, trial.plan) for one in self._sets(trial.case)]
        return self._prepared[key]


def effort_of(trial: Trial, bandwidth: float, flops: float) -> Effort:
    """As many launches as are needed for a time without the graph's own; of long ones a few."""
    shape, tokens = trial.case.shape, trial.case.num_tokens
    num_bytes, num_flops = moe.floors(shape, tokens, moe.expected_active(shape, tokens))[
        trial.part or "whole"
    ]
    least = max(num_bytes / bandwidth, num_flops / flops)
    return Effort(launches=max(3, min(12, math.ceil(ENOUGH / least))), seconds=0.012, replays=3)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:160]
