"""8-bit linear maps of Llama 3 8B, their input's quantisation included, beside the same maps in bf16.

`python -m oneloop_bench.kernels.fp8_linear [--only TEXT] [--rows 1,32]`: "gate_up 0008 rows by row", "… by block" and
"… bf16". GB/s counts what each must move; the share is of the ceiling of memory, or of products in bf16: those of 8
bits may pass it.

--sweep: plans for each map and number of rows with scales by row, and at the end lines of
`oneloop_kernels.ops.fp8_linear.plans.TUNED`. About 3 s per map and number of rows.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels.linear import (
    MODELS,
    Map,
    dense_plans,
    grids,
    short,
    shrunken,
)
from oneloop_bench.kernels.linear import make_inputs as make_plain_inputs
from oneloop_bench.kernels.timing import Effort, KernelBench, bench_arguments, time_launches
from oneloop_bench.report import run_bench
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear.gpu import by_plan, linear
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan
from oneloop_kernels.ops.fp8_linear.quantize import quantize_blocks, quantize_rows
from oneloop_kernels.ops.linear.gpu import linear as plain_linear
from oneloop_kernels.ops.linear.plans import StreamPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from oneloop_kernels.ops.fp8_linear.plans import Plan
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.linear.plans import DensePlan

WAYS: Final = ("by row", "by block", "bf16")
ROWS: Final = (1, 8, 32, 128, 256, 2048, 8192)
SWEEP_ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
MOST_CHUNKS: Final = 4
"""Of a dense plan: products of 8 bits are over sooner than those of 16."""
SMOKE_ROWS: Final = (1, 32)
EFFORT: Final = Effort(launches=32, seconds=0.04, replays=6)
"""Of the sweep, for each plan."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random inputs of one map, with the weight in 16 bits, and in 8 with either kind of scales."""

    call: LinearCall
    by_row: tuple[torch.Tensor, torch.Tensor]
    by_block: tuple[torch.Tensor, torch.Tensor]

    def run(self, way: str) -> torch.Tensor:
        """way: bf16, by row, by block."""
        if way == "bf16":
            return plain_linear(self.call)
        weight, scales = self.by_row if way == "by row" else self.by_block
        return linear(self.call._replace(weight=weight), scales)

    def by(self, plan: Plan | None) -> torch.Tensor:
        """With scales by row, as the plan says."""
        weight, scales = self.by_row
        return by_plan(plan, self.call._replace(weight=weight), scales)


def make_inputs(one: Map, num_tokens: int, device: torch.device) -> Inputs:
    """As for the map in bf16, its weight quantised."""
    call = make_plain_inputs(one, num_tokens, device).call()
    return Inputs(call, quantize_rows(call.weight), quantize_blocks(call.weight, BLOCK))


def num_bytes(one: Map, num_tokens: int, way: str) -> int:
    """As Map.num_bytes; weights of 8 bits are half as many."""
    plain = one.num_bytes(num_tokens)
    return plain if way == "bf16" else plain - one.out_size * one.in_size


def compile_all(bench: KernelBench, maps: Sequence[Map], rows: Sequence[int]) -> None:
    """What `compare` or `sweep` runs, in other processes."""
    number = usable_cpus()
    workers = CompileWorkers.start(number)
    with compiling_ahead(number, workers):
        for one, num_tokens in itertools.product(maps, rows):
            inputs = make_inputs(one, num_tokens, bench.device)
            for way in () if bench.sweep else WAYS:
                inputs.run(way)
            for plan in candidates(one, num_tokens) if bench.sweep else ():
                inputs.by(plan)
    if workers is not None:
        workers.close()


def compare(bench: KernelBench, one: Map, rows: Sequence[int]) -> None:
    """The family's choice at every number of rows."""
    for num_tokens in rows:
        names = {way: f"{one.name} {num_tokens:04d} rows {way}" for way in WAYS}
        if not any(bench.wanted(name) for name in names.values()):
            continue
        sets = bench.sets(
            lambda: make_inputs(one, num_tokens, bench.device),  # noqa: B023
            num_bytes=num_bytes(one, num_tokens, "by row"),
        )
        for way, name in names.items():
            row = bench.measure(
                name,
                lambda inputs: inputs.run(way),  # noqa: B023
                sets,
                num_bytes=num_bytes(one, num_tokens, way),
                num_flops=2 * num_tokens * one.out_size * one.in_size,
            )
            if row is not None:
                print(
                    f"{row.name}: {row.us:.2f} µs, {row.gb_s:.0f} GB/s, {row.tflop_s:.0f} TFLOP/s", flush=True
                )


def candidates(one: Map, num_tokens: int) -> Iterator[StreamPlan | DensePlan]:
    """Plans worth a try with scales by row."""
    if num_tokens <= 128:
        yield from streaming_plans(one, num_tokens)
    if num_tokens >= 64:
        yield from dense_plans(one, num_tokens, most_chunks=MOST_CHUNKS)


def streaming_plans(one: Map, num_tokens: int) -> Iterator[StreamPlan]:
    """Shared memory is full, or half of it, so that two programs share a multiprocessor."""
    halves = 2 if one.gated else 1
    for block_n, block_k, shared, rows in itertools.product(
        (64, 128), (128, 256), (104 << 10, 208 << 10), (8, 16, 32, 64)
    ):
        sums = halves * block_n * rows // 128
        stages = min(12, shared // ((halves * block_n + rows) * block_k))
        if rows > max(8, num_tokens) or rows * 2 < num_tokens or sums > 64 or stages < 3:
            continue
        for programs in grids(-(-one.result_size // block_n) * -(-num_tokens // rows), one.in_size):
            if programs <= 132 or shared == 104 << 10:
                yield StreamPlan(block_n, block_k, stages, 4, programs, rows)


def sweep(bench: KernelBench, one: Map, rows: Sequence[int]) -> list[tuple[int, Plan | None]]:
    """The best plan (None: cuBLAS) for each number of rows."""
    found: list[tuple[int, Plan | None]] = []
    for num_tokens in rows:
        moved = num_bytes(one, num_tokens, "by row")
        sets = bench.sets(lambda: make_inputs(one, num_tokens, bench.device), num_bytes=moved)  # noqa: B023
        plans: dict[str, Plan | None] = {"cuBLAS": None}
        if bench.device.type == "cuda":
            plans |= {short(plan): plan for plan in candidates(one, num_tokens)}
        else:
            plans = {"tiles": TilesPlan(16)}
        times = {
            key: time_launches(way(plan), sets, smoke=bench.smoke, effort=EFFORT).us
            for key, plan in plans.items()
        }
        ranking = sorted(times, key=lambda key: times[key])
        best = ", ".join(f"{key} {times[key]:.2f}" for key in (*ranking[:4], ranking[-1]))
        print(
            f"{one.name} {num_tokens:04d} rows, {moved / times[ranking[0]] / 1e3:.0f} GB/s: {best}",
            flush=True,
        )
        found.append((num_tokens, plans[ranking[0]]))
    return found


def way(plan: Plan | None) -> Callable[[Inputs], torch.Tensor]:
    """How a set is computed by the plan."""
    return lambda inputs: inputs.by(plan)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))))
    own, others = parser.parse_known_args()
    bench = KernelBench("fp8_linear", bench_arguments(__doc__, others))
    rows = own.rows or (SWEEP_ROWS if bench.sweep else ROWS)
    if bench.device.type != "cuda":
        rows = SMOKE_ROWS
    maps: Sequence[Map] = MODELS["llama8b"][:4]
    lines = []
    if bench.device.type == "cuda":
        maps = [one for one in maps if bench.wanted(one.name) or not bench.sweep]
        compile_all(bench, maps, rows)
    else:
        maps = tuple(shrunken(one) for one in maps)
    for one in maps:
        if bench.sweep:
            if found := sweep(bench, one, rows):
                lines.append(f"    ({one.out_size}, {one.in_size}, {one.gated}): {tuple(found)!r},")
        else:
            compare(bench, one, rows)
    print("\n".join(lines))
    bench.finish(tuned=lines)


if __name__ == "__main__":
    run_bench(main)
