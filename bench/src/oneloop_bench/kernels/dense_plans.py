"""Plans of Llama 3 8B's maps of 8 bits and of packed ones: a few candidates each, in chains of layers.

`python -m oneloop_bench.kernels.dense_plans [--fp8 8,16,32,64] [--packed 4,64,128]`: about half a minute on 16 cores.
Printed at the end is the text of `ops/fp8_linear/plans.py` and `ops/packed_linear/plans.py`: their tables of the H200
with what was found in the place of what is there for as many rows. Wider sweeps: `fp8_chain`, `packed_linear --sweep`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from oneloop_bench.kernels import fp8_chain, packed_linear, plan_text
from oneloop_bench.kernels import linear as plain
from oneloop_bench.kernels.timing import KernelBench, add_bench_arguments
from oneloop_bench.report import BenchError, run_bench
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear import plans as fp8_plans
from oneloop_kernels.ops.linear.plans import DensePlan, StreamPlan
from oneloop_kernels.ops.packed_linear import plans as packed_plans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from oneloop_bench.kernels.fp8_chain import Layer
    from oneloop_bench.kernels.linear import Map
    from oneloop_kernels.ops.fp8_linear.plans import Plan
    from oneloop_kernels.ops.linear.plans import Shape
    from oneloop_kernels.ops.packed_linear.plans import StreamPlan as PackedPlan

CARD: Final = "NVIDIA H200"
MOST_TILE_ROWS: Final = 64
DENSE_ROWS: Final = 64


def fp8_candidates(name: str, rows: int) -> list[Plan | None]:
    """What stands in the table; longest copies, with all rows in one tile; from DENSE_ROWS rows dense ones too."""
    several = [plan for plan in fp8_chain.candidates(name, rows) if _worth_it(plan, rows)]
    return list(dict.fromkeys([fp8_chain.plan_of(name, rows), *several]))


def _worth_it(plan: Plan | None, rows: int) -> bool:
    if isinstance(plan, StreamPlan):
        return plan.block_k == 2 * BLOCK and plan.most_rows >= min(rows, MOST_TILE_ROWS)
    return plan is None or (isinstance(plan, DensePlan) and rows >= DENSE_ROWS)


def fp8_found(layers: Sequence[Layer], rows: Sequence[int]) -> dict[Shape, dict[int, Plan | None]]:
    """The best plans, by shape and number of rows. layers: of `fp8_chain.make_layer`."""
    plans = {count: {name: fp8_candidates(name, count) for name in fp8_chain.MAPS} for count in rows}
    begin = time.perf_counter()
    fp8_chain.compile_all(layers, rows, plans)
    number = sum(len(several) for by_name in plans.values() for several in by_name.values())
    print(f"8 bits: {number} candidates compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    best = {count: fp8_chain.search(layers, count, plans[count])[0] for count in rows}
    return {
        (one.out_size, one.in_size, one.gated): {count: best[count][name] for count in rows}
        for name, one in fp8_chain.MAPS.items()
    }


def packed_candidates(one: Map, num_tokens: int, device: torch.device) -> Iterator[PackedPlan]:
    """Of those of the wider sweep the ones whose programs fill all the room that they leave themselves."""
    fullest: dict[PackedPlan, PackedPlan] = {}
    for plan in packed_linear.candidates(one, num_tokens, device):
        way = replace(plan, programs=0)
        if way not in fullest or plan.programs > fullest[way].programs:
            fullest[way] = plan
    yield from fullest.values()


def packed_found(
    bench: KernelBench, maps: Sequence[Map], rows: Sequence[int]
) -> dict[Shape, dict[int, PackedPlan | None]]:
    """Likewise, for 4 bits in groups of 128."""
    found = packed_linear.sweep(bench, maps, rows, "w4", packed_candidates, turns=1)
    return {(one.out_size, one.in_size, one.gated): dict(choices) for one, choices in found.items()}


def main() -> None:
    """Run the sweeps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_arguments(parser)
    parser.add_argument("--fp8", type=_numbers, default=(8, 16, 32, 64), help="rows of x")
    parser.add_argument("--packed", type=_numbers, default=(4, 64, 128), help="rows of x")
    options = parser.parse_args()
    bench = KernelBench("dense_plans", options)
    if bench.device.type != "cuda":
        raise BenchError("plans are timed on a GPU alone")
    bench.sweep_effort = packed_linear.SWEEP_EFFORT
    tables = {}
    if options.fp8:
        layers = [fp8_chain.make_layer(bench.device) for _ in range(fp8_chain.LAYERS)]
        tables["fp8_linear"] = plan_text.table(fp8_plans.TUNED[CARD], fp8_found(layers, options.fp8))
        del layers
    if options.packed:
        found = packed_found(bench, plain.MODELS[packed_linear.MODEL][:4], options.packed)
        tables["packed_linear"] = plan_text.table(packed_plans.TUNED[CARD], found)
    for family, text in tables.items():
        print(f"kernels/src/oneloop_kernels/ops/{family}/plans.py:\n{text}", flush=True)
    bench.finish(tuned=tables)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


if __name__ == "__main__":
    run_bench(main)
