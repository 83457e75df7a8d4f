"""Mixtures of experts: routing, the experts' products, the sum; a layer of Qwen 3 30B-A3B.

`python -m oneloop_bench.kernels.moe [--only TEXT]`: the whole block and its parts at numbers of tokens from 1 to 8192.
Names: "qwen30ba3b 0032 whole", "… route", "… gate_up", "… down", "… combine"; "qwen30ba3b+fp8 …" and "…-block …" are of
weights of 8 bits, whose products' times have what quantises x before. Bytes are those of the experts that are asked
for, and of the activations; routing is that of random tokens and a random router.

--sweep: plans for each number of tokens, and at the end what belongs into `oneloop_kernels/ops/moe/configs`. Takes some
5 s per number of tokens on 16 cores: narrow it with --only ("0032").
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels.timing import Effort, KernelBench, bench_arguments, time_launches
from oneloop_bench.report import run_bench
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import INTERPRETED, compiling_ahead
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear.quantize import quantize_blocks, quantize_rows
from oneloop_kernels.ops.linear import Norm
from oneloop_kernels.ops.moe import Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.gpu import combine, down, gate_up, route, run
from oneloop_kernels.ops.moe.plans import MAX_FEW, MoePlan, ProductPlan, Shape, plan_for
from oneloop_kernels.ops.moe.reference import route as reference_route
from oneloop_kernels.ops.moe.weights import ExpertWeight, Fp8Stack
from oneloop_kernels.ops.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

    from oneloop_kernels.ops.moe.launches import Routed

QWEN_30B: Final = Shape(num_experts=128, top_k=8, hidden=2048, width=768)
SHAPES: Final = {
    "qwen30ba3b": QWEN_30B,
    "qwen30ba3b+fp8": replace(QWEN_30B, weights="fp8"),
    "qwen30ba3b+fp8-block": replace(QWEN_30B, weights="fp8-block"),
}
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SMOKE_SHAPE: Final = Shape(num_experts=8, top_k=2, hidden=128, width=128)
SMOKE_SHAPES: Final = {"smoke": SMOKE_SHAPE, "smoke+fp8": replace(SMOKE_SHAPE, weights="fp8")}
SMOKE_TOKENS: Final = (2, 40)
MAX_SHARED_BYTES: Final = 220 << 10
SWEEP_EFFORT: Final = Effort(launches=12, seconds=0.02, replays=5)
MANY: Final = 48
"""Mean tokens of an expert from which tokens are tried as the wide side."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One layer and a batch."""

    call: MoeCall
    num_active: int
    """Experts that some token is sent to."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs, and what the kernels before a product leave."""

    inputs: Inputs
    routed: Routed
    inner: torch.Tensor
    outputs: torch.Tensor


def make_inputs(shape: Shape, num_tokens: int, device: torch.device) -> Inputs:
    """Random weights and tokens."""
    dtype = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # the interpreter has no right bfloat16

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device).mul_(scale)

    def weight(rows: int, columns: int) -> ExpertWeight:
        if shape.weights == "plain":
            return normal(shape.num_experts, rows, columns, scale=0.02)
        quantize = quantize_rows if shape.weights == "fp8" else partial(quantize_blocks, block_rows=BLOCK)
        parts = [quantize(normal(rows, columns, scale=0.02)) for _ in range(shape.num_experts)]
        return Fp8Stack(torch.stack([one for one, _ in parts]), torch.stack([scales for _, scales in parts]))

    experts = Experts(
        normal(shape.num_experts, shape.hidden),
        weight(2 * shape.width, shape.hidden),
        weight(shape.hidden, shape.width),
        shape.top_k,
        renormalised=True,
    )
    norm = Norm(normal(shape.hidden), 1e-6)
    x = normal(num_tokens, shape.hidden)
    slots = torch.arange(num_tokens, device=device)
    counters = torch.zeros(num_counters(shape.num_experts), dtype=torch.int32, device=device)
    ids = reference_route(rms_norm(x, norm.weight, norm.eps), experts).ids
    return Inputs(MoeCall(x, experts, norm, counters, slots), int((ids.flatten().bincount() > 0).sum()))


def expected_active(shape: Shape, num_tokens: int) -> float:
    """Experts that random tokens ask for, on average: each token for top_k of them, any with the same chance."""
    return shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** num_tokens)


def prepare(inputs: Inputs, plan: MoePlan) -> Prepared:
    """Run what stands before each part."""
    routed = route(inputs.call, plan)
    inner = gate_up(inputs.call, plan, routed).run()
    return Prepared(inputs, routed, inner, down(inputs.call, plan, routed, inner).run())


def floors(shape: Shape, num_tokens: int, num_active: float) -> dict[str, tuple[float, float]]:
    """Part → fewest bytes, and FLOP."""
    pairs, item, stored = num_tokens * shape.top_k, 2, 2 if shape.weights == "plain" else 1
    matrix = shape.hidden * shape.width
    parts = {
        "route": (
            item * (shape.num_experts + 2 * num_tokens) * shape.hidden,
            2.0 * num_tokens * shape.num_experts * shape.hidden,
        ),
        "gate_up": (
            stored * 2 * num_active * matrix + item * (num_tokens * shape.hidden + pairs * shape.width),
            4.0 * pairs * matrix,
        ),
        "down": (
            stored * num_active * matrix + item * pairs * (shape.width + shape.hidden),
            2.0 * pairs * matrix,
        ),
        "combine": (item * (pairs + 2 * num_tokens) * shape.hidden, 0.0),
    }  # fmt: skip
    whole_bytes = stored * 3 * num_active * matrix
    whole_bytes += item * (shape.num_experts + 2 * num_tokens) * shape.hidden
    return parts | {"whole": (whole_bytes, sum(flops for _, flops in parts.values()))}


def parts_of(plan: MoePlan) -> dict[str, Callable[[Prepared], object]]:
    """Part → its launch."""
    return {
        "whole": lambda one: run(one.inputs.call, plan),
        "route": lambda one: route(one.inputs.call, plan),
        "gate_up": lambda one: gate_up(one.inputs.call, plan, one.routed).run(),
        "down": lambda one: down(one.inputs.call, plan, one.routed, one.inner).run(),
        "combine": lambda one: combine(one.inputs.call, one.routed, one.outputs),
    }


def measure(bench: KernelBench, name: str, shape: Shape, num_tokens: int) -> None:
    """The family's own plan."""
    if not any(bench.wanted(f"{name} {part}") for part in floors(shape, 1, 1)):
        return
    sets = input_sets(bench, shape, num_tokens)
    call = sets[0].call
    plan = plan_for(bench.device, call.x.dtype, num_tokens, shape)
    prepared = [prepare(one, plan) for one in sets]
    counted = floors(shape, num_tokens, mean_active(sets))
    for part, launch in parts_of(plan).items():
        num_bytes, num_flops = counted[part]
        bench.measure(f"{name} {part}", launch, prepared, num_bytes=num_bytes, num_flops=num_flops)


def input_sets(bench: KernelBench, shape: Shape, num_tokens: int) -> Sequence[Inputs]:
    """So many layers that no weights are found in the cache."""
    bytes_of_expert = (6 if shape.weights == "plain" else 3) * shape.hidden * shape.width
    touched = bytes_of_expert * min(shape.num_experts, num_tokens * shape.top_k)
    return bench.sets(lambda: make_inputs(shape, num_tokens, bench.device), num_bytes=touched)


def mean_active(sets: Sequence[Inputs]) -> float:
    """Experts that a batch asks for."""
    return sum(one.num_active for one in sets) / len(sets)


def tile_heights(num_tokens: int, mean: float) -> list[int]:
    """block_m worth a try: that most experts fit into, twice that, or all tokens of a small batch."""
    if mean >= MANY:
        return [64, 128]
    fitting = max(8, 1 << math.ceil(math.log2(mean + 2 * math.sqrt(mean))))
    everyone = max(8, 1 << (num_tokens - 1).bit_length())
    other = fitting // 2 if fitting > 32 else 2 * fitting
    return sorted({fitting, everyone if num_tokens <= 32 else other})


def candidates(block_m: int, *, gated: bool, many: bool, full: Shape) -> Iterator[ProductPlan]:
    """Products worth a try: shared memory for one, two or three programs on a multiprocessor."""
    if full.weights != "plain":
        yield from candidates_of_8_bits(block_m, gated=gated, many=many, full=full)
        return
    halves = 2 if gated else 1
    in_size = full.hidden if gated else full.width
    if many:
        for stages in (3, 4):
            yield ProductPlan("grouped", 128 if gated else 256, 64, stages, block_m // 16)
        for block_n, stages, warps in itertools.product((64, 128, 256), (3, 4), (4, 8)):
            columns = halves * block_n
            sums = block_m * columns // (32 * warps)
            shared = (columns + block_m) * 64 * 2 * stages
            if 32 <= sums <= 256 and 64 <= columns <= 256 and shared <= MAX_SHARED_BYTES:
                yield ProductPlan("tokens", block_n, 64, stages, warps)
        return
    for columns, programs in itertools.product((32, 64, 128, 256), (1, 2, 3, 4)):
        block_k = 64 if columns == 256 else 128
        stage_bytes = (columns + block_m) * block_k * 2
        stages = min(MAX_SHARED_BYTES // programs // stage_bytes, in_size // block_k + 1, 10)
        if stages >= 2 and in_size % block_k == 0:
            warps = 8 if columns * block_m > 8192 else 4
            yield ProductPlan("weights", columns // halves, block_k, stages, warps)


def candidates_of_8_bits(block_m: int, *, gated: bool, many: bool, full: Shape) -> Iterator[ProductPlan]:
    """The same. Blocks of columns are those of scales, or also twice as many."""
    halves, in_size = 2 if gated else 1, full.hidden if gated else full.width
    kind: Literal["tokens", "weights"] = "tokens" if many else "weights"
    block_ks = (BLOCK, 2 * BLOCK) if full.weights == "fp8" and in_size % (2 * BLOCK) == 0 else (BLOCK,)
    for columns, block_k, programs in itertools.product((64, 128, 256), block_ks, (1, 2, 3, 4)):
        stages = min(
            MAX_SHARED_BYTES // programs // ((columns + block_m) * block_k), in_size // block_k + 1, 10
        )
        warps = 8 if columns * block_m > 8192 else 4
        if stages < 2 or columns * block_m > 32768:
            continue
        for inside in (False, True) if block_m <= 16 and not many else (False,):
            yield ProductPlan(kind, columns // halves, block_k, stages, warps, quantizes=inside)


def sweep(bench: KernelBench, name: str, shape: Shape, num_tokens: int) -> MoePlan | None:
    """The best plan."""
    if not bench.wanted(name):
        return None
    sets = input_sets(bench, shape, num_tokens)
    mean = num_tokens * shape.top_k / shape.num_experts
    base = plan_for(bench.device, sets[0].call.x.dtype, num_tokens, shape)
    found: list[MoePlan] = []
    for block_m in tile_heights(num_tokens, mean):
        start = replace(base, block_m=block_m, combined=False)
        prepared = [prepare(one, start) for one in sets]
        ranked: dict[str, list[ProductPlan]] = {}
        for part in ("gate_up", "down"):
            tried = set(candidates(block_m, gated=part == "gate_up", many=mean >= MANY, full=shape))
            times = sweep_part(bench, prepared, start, part, tried)
            ranked[part] = sorted(times, key=lambda plan: times[plan])
            if times:
                report(name, f"{part} m{block_m}", times)
        if ranked["gate_up"] and ranked["down"]:
            best_of = ranked["gate_up"][0], ranked["down"][0]
            found += whole_plans(start, *best_of, num_tokens, shape.weights)
    wholes = {plan: time_whole(bench, sets, plan) for plan in found}
    for plan in sorted(wholes, key=lambda plan: wholes[plan])[:6]:
        products = f"{short(plan.gate_up)} {short(plan.down)} ahead {plan.down.prefetch}"
        print(
            f"  {name} whole m{plan.block_m}: {wholes[plan]:.1f} {products} combined {plan.combined} "
            f"together {plan.together}",
            flush=True,
        )
    if not wholes:
        return None
    best = min(wholes, key=lambda plan: wholes[plan])
    prepared = [prepare(one, best) for one in sets]
    counted = floors(shape, num_tokens, mean_active(sets))
    for part, launch in parts_of(best).items():
        num_bytes, num_flops = counted[part]
        bench.measure(f"{name} {part}", launch, prepared, num_bytes=num_bytes, num_flops=num_flops)
    return best


def whole_plans(
    start: MoePlan, gate_up: ProductPlan, down: ProductPlan, num_tokens: int, weights: str
) -> Iterator[MoePlan]:
    """What only the whole shows: both products by one kernel, down's weights asked for ahead, the sum in its kernel."""
    plan = with_products(start, {"gate_up": gate_up, "down": down})
    yield plan
    if down.kind != "weights" or gate_up.kind != "weights":
        return
    sums = (False, True) if num_tokens <= MAX_FEW else (False,)
    joined = (False, True) if weights == "plain" else (False,)
    for prefetch, combined, together in itertools.product((0, 256, 512, 1024), sums, joined):
        ahead = replace(down, prefetch=prefetch)
        yield replace(with_products(plan, {"down": ahead}), combined=combined, together=together)


def time_whole(bench: KernelBench, sets: Sequence[Inputs], plan: MoePlan) -> float:
    """µs of the block; without an end where a kernel does not run."""
    try:
        return time_launches(lambda one: run(one.call, plan), sets, smoke=bench.smoke, effort=SWEEP_EFFORT).us
    except Exception as error:  # whatever the compiler says: the other plans go on
        print(f"  whole {plan} fails: {(str(error).splitlines() or [repr(error)])[0]}")
        return math.inf


def sweep_part(
    bench: KernelBench, prepared: Sequence[Prepared], start: MoePlan, part: str, tried: Set[ProductPlan]
) -> dict[ProductPlan, float]:
    """Plan → µs, of those that run."""
    launches = {plan: parts_of(with_products(start, {part: plan}))[part] for plan in tried}
    with compiling(bench):
        for launch in launches.values():
            launch(prepared[0])
    times = {}
    for plan, launch in launches.items():
        try:
            times[plan] = time_launches(launch, prepared, smoke=bench.smoke, effort=SWEEP_EFFORT).us
        except Exception as error:  # whatever the compiler says: the other candidates go on
            print(f"  {part} {plan} fails: {(str(error).splitlines() or [repr(error)])[0]}")
    return times


def with_products(plan: MoePlan, products: dict[str, ProductPlan]) -> MoePlan:
    """The plan with other ones for "gate_up" or "down"."""
    return replace(plan, gate_up=products.get("gate_up", plan.gate_up), down=products.get("down", plan.down))


_WORKERS: Final[list[CompileWorkers | None]] = []


def compiling(bench: KernelBench) -> Any:
    """Within, launches compile, on all CPUs."""
    if bench.smoke or INTERPRETED:
        return nullcontext()
    if not _WORKERS:
        _WORKERS.append(CompileWorkers.start(usable_cpus()))
    return compiling_ahead(usable_cpus(), _WORKERS[0])


def report(name: str, part: str, times: dict[ProductPlan, float]) -> None:
    """The three best and the worst."""
    ranking = sorted(times, key=lambda plan: times[plan])
    shown = [f"{times[plan]:.1f} {short(plan)}" for plan in (*ranking[:3], ranking[-1])]
    print(f"  {name} {part}: " + " | ".join(shown), flush=True)


def short(plan: ProductPlan) -> str:
    """A name for the table."""
    inside = "q" if plan.quantizes else ""
    return f"{plan.kind[0].upper()}{plan.block_n}x{plan.block_k}/{plan.num_stages}w{plan.num_warps}{inside}"


def main() -> None:
    """Run the bench."""
    bench = KernelBench("moe", bench_arguments(__doc__))
    tuned = []
    shapes, tokens = (SHAPES, TOKENS) if bench.device.type == "cuda" else (SMOKE_SHAPES, SMOKE_TOKENS)
    for model, shape in shapes.items():
        plans = []
        for num_tokens in tokens:
            name = f"{model} {num_tokens:04d}"
            if not bench.sweep:
                measure(bench, name, shape, num_tokens)
            elif (plan := sweep(bench, name, shape, num_tokens)) is not None:
                plans.append({"tokens": num_tokens, **asdict(plan)})
        if plans:
            tuned.append({"shape": asdict(shape), "plans": plans})
    if tuned:
        print(json.dumps(tuned))
    for workers in _WORKERS:
        if workers is not None:
            workers.close()
    bench.finish(tuned=tuned)


if __name__ == "__main__":
    run_bench(main)
