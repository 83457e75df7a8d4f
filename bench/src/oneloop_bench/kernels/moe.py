"""Mixtures of experts: routing, the experts' products, the sum; a layer of Qwen 3 30B-A3B.

`python -m oneloop_bench.kernels.moe [--only TEXT]`: the whole block and its parts at numbers of tokens from 1 to 8192.
Names: "qwen30ba3b 0032 whole", "… route", "… gate_up", "… down", "… combine". Bytes are those of the experts that are
asked for, and of the activations; routing is that of random tokens and a random router. Models "…+fp8", "…+fp8-block"
have weights of 8 bits, and their products' times what quantises x before.

--sweep: `moe_sweep` finds plans for each number of tokens of the models that --models names; printed, and with --write
FILE put into it, is what belongs into `oneloop_kernels/ops/moe/configs`. Takes about half a minute for each model on 16
cores: narrow it with --only ("0032").
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, add_bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear.quantize import quantize_blocks, quantize_rows
from oneloop_kernels.ops.linear import Norm
from oneloop_kernels.ops.moe import Experts, MoeCall, num_counters
from oneloop_kernels.ops.moe.gpu import combine, down, gate_up, route, run
from oneloop_kernels.ops.moe.plans import MoePlan, Shape, plan_for
from oneloop_kernels.ops.moe.reference import route as reference_route
from oneloop_kernels.ops.moe.weights import ExpertWeight, Fp8Stack
from oneloop_kernels.ops.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop_kernels.ops.moe.launches import Routed

_PLAIN: Final = {
    "qwen30ba3b": Shape(num_experts=128, top_k=8, hidden=2048, width=768),
    "mixtral8x7b": Shape(num_experts=8, top_k=2, hidden=4096, width=14336),
    "qwen15moe": Shape(num_experts=60, top_k=4, hidden=2048, width=1408),
    "qwen57ba14b": Shape(num_experts=64, top_k=8, hidden=3584, width=2560),
}
SHAPES: Final = _PLAIN | {
    f"{name}+{kind}": replace(shape, weights=kind)
    for name, shape in _PLAIN.items()
    for kind in ("fp8", "fp8-block")
}
TOKENS: Final[tuple[int, ...]] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SMOKE_SHAPE: Final = Shape(num_experts=8, top_k=2, hidden=128, width=128)
SMOKE_SHAPES: Final = {"smoke": SMOKE_SHAPE, "smoke+fp8": replace(SMOKE_SHAPE, weights="fp8")}
SMOKE_TOKENS: Final[tuple[int, ...]] = (2, 40)
SWEPT_TOKENS: Final[tuple[int, ...]] = (1, 8, 32, 128, 512, 2048, 8192)


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


def normal(device: torch.device, *sizes: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers, in bfloat16 where that is right."""
    dtype = (
        torch.bfloat16 if device.type == "cuda" else torch.float16
    )  # the interpreter has no right bfloat16
    return torch.randn(*sizes, dtype=dtype, device=device).mul_(scale)


def make_experts(shape: Shape, device: torch.device) -> Experts:
    """Random weights."""

    def weight(rows: int, columns: int) -> ExpertWeight:
        if shape.weights == "plain":
            return normal(device, shape.num_experts, rows, columns, scale=0.02)
        quantize = quantize_rows if shape.weights == "fp8" else partial(quantize_blocks, block_rows=BLOCK)
        parts = [quantize(normal(device, rows, columns, scale=0.02)) for _ in range(shape.num_experts)]
        return Fp8Stack(torch.stack([one for one, _ in parts]), torch.stack([scales for _, scales in parts]))

    return Experts(
        normal(device, shape.num_experts, shape.hidden),
        weight(2 * shape.width, shape.hidden),
        weight(shape.hidden, shape.width),
        shape.top_k,
        renormalised=True,
    )


def make_inputs(
    shape: Shape, num_tokens: int, device: torch.device, experts: Experts | None = None
) -> Inputs:
    """Random tokens, and weights where none are given."""
    experts = experts or make_experts(shape, device)
    norm = Norm(normal(device, shape.hidden), 1e-6)
    x = normal(device, num_tokens, shape.hidden)
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


def item_bytes(shape: Shape) -> int:
    """Of a weight, its scales apart."""
    return 2 if shape.weights == "plain" else 1


def floors(shape: Shape, num_tokens: int, num_active: float) -> dict[str, tuple[float, float]]:
    """Part → fewest bytes, and FLOP."""
    pairs, item, stored = num_tokens * shape.top_k, 2, item_bytes(shape)
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
            stored * num_active * matrix + item * pairs * (shape.width + shape.hidden), 2.0 * pairs * matrix
        ),
        "combine": (item * (pairs + 2 * num_tokens) * shape.hidden, 0.0),
    }  # fmt: skip
    around = item * (shape.num_experts + 2 * num_tokens) * shape.hidden
    whole_bytes = stored * 3 * num_active * matrix + around
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
    expert_bytes = 3 * shape.hidden * shape.width * item_bytes(shape)
    touched = expert_bytes * min(shape.num_experts, num_tokens * shape.top_k)
    return bench.sets(lambda: make_inputs(shape, num_tokens, bench.device), num_bytes=touched)


def mean_active(sets: Sequence[Inputs]) -> float:
    """Experts that a batch asks for."""
    return sum(one.num_active for one in sets) / len(sets)


def main() -> None:
    """Run the bench."""
    from oneloop_bench.kernels import moe_sweep  # which measures what is above

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_arguments(parser)
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["qwen30ba3b"], help=", ".join(SHAPES)
    )
    parser.add_argument("--write", type=Path, help="--sweep: put the plans into this file of configs")
    options = parser.parse_args()
    bench = KernelBench("moe", options)
    shapes, tokens, swept = {name: SHAPES[name] for name in options.models}, TOKENS, SWEPT_TOKENS
    if bench.device.type != "cuda":
        shapes, tokens, swept = SMOKE_SHAPES, SMOKE_TOKENS, SMOKE_TOKENS
    tuned: list[dict[str, object]] = []
    if bench.sweep:
        with moe_sweep.CardClock(bench) as clock:
            for model, shape in shapes.items():
                counts = [count for count in swept if bench.wanted(f"{model} {count:04d}")]
                cases = [moe_sweep.Case(model, shape, count) for count in counts]
                found = moe_sweep.entries(moe_sweep.sweep(clock, cases))
                tuned += found
                if options.write is not None:  # at once: whoever ends the sweep keeps what it has
                    moe_sweep.write(options.write, found)
        print(json.dumps(tuned))
    else:
        for model, shape in shapes.items():
            for count in tokens:
                measure(bench, f"{model} {count:04d}", shape, count)
    bench.finish(tuned=tuned)


if __name__ == "__main__":
    run_bench(main)
