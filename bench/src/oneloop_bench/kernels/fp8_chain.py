"""Plans of the 8-bit linear maps of Llama 3 8B, chosen in chains of layers: a kernel overlaps with those beside it.

`python -m oneloop_bench.kernels.fp8_chain [--rows 1,256] [--maps qkv,down]`: layers without attention, each with
weights of its own, scales per row. One map after the other tries every plan while the others keep what was best so far;
printed are the best few of each, and in the end all of them with the time of a layer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels.fp8_linear import MOST_CHUNKS, streaming_plans
from oneloop_bench.kernels.linear import MODELS, SMS, dense_plans, short
from oneloop_bench.kernels.timing import KernelBench, bench_arguments, event_times
from oneloop_bench.report import BenchError, run_bench
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear import BLOCK
from oneloop_kernels.ops.fp8_linear.gpu import by_plan
from oneloop_kernels.ops.fp8_linear.plans import TilesPlan, plan_for
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.plans import StreamPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from oneloop_bench.kernels.linear import Map
    from oneloop_kernels.ops.fp8_linear.plans import Plan

MAPS: Final = {one.name: one for one in MODELS["llama8b"][:4]}
LAYERS: Final = 4
"""Their weights pass the cache by far."""
ROUNDS: Final = 2
"""Of the layers in a graph."""
REPLAYS: Final = 12
LEAST_WIDTH: Final = 32
"""Of a chunk of results."""

Choice = dict[str, "Plan | None"]


@dataclass(frozen=True, slots=True)
class Layer:
    """weights, scales: by the map's name."""

    weights: Mapping[str, torch.Tensor]
    scales: Mapping[str, torch.Tensor]
    norm: Norm


def make_layer(device: torch.device) -> Layer:
    weights, scales = {}, {}
    for name, one in MAPS.items():
        plain = torch.randn(one.out_size, one.in_size, dtype=torch.bfloat16, device=device)
        weights[name] = (plain * 64).to(FP8)
        scales[name] = torch.full((one.out_size,), one.in_size**-0.5 / 64, device=device)
    return Layer(weights, scales, Norm(torch.ones(4096, dtype=torch.bfloat16, device=device), 1e-5))


def run_layer(layer: Layer, x: torch.Tensor, tickets: torch.Tensor, plans: Choice) -> None:
    """x: [rows, hidden size], what is normalised and added to. The queries stand for what attention leaves."""

    def compute(name: str, given: torch.Tensor, of_gate: bool = False) -> torch.Tensor:
        one = MAPS[name]
        call = LinearCall(
            given,
            layer.weights[name],
            norm=layer.norm if one.norm else None,
            gated=one.gated and plans[name] is not None,
            residual=x if one.residual else None,
            tickets=tickets,
        )
        return by_plan(plans[name], call, layer.scales[name], of_gate=of_gate)

    queries = compute("qkv", x)[:, :4096]
    compute("o", queries)
    compute("down", compute("gate_up", x), of_gate=plans["gate_up"] is None)


def time_of(layers: Sequence[Layer], rows: int, plans: Choice) -> float:
    """µs of a layer."""
    device = layers[0].norm.weight.device
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)

    def run_all() -> None:
        for layer in layers:
            run_layer(layer, x, tickets, plans)

    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_all()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            run_all()
    times = event_times(graph.replay, REPLAYS)
    return statistics.median(times) / (ROUNDS * len(layers)) * 1e6


def candidates(name: str, rows: int) -> Iterator[Plan | None]:
    """None: cuBLAS, which leaves a gate to the map after."""
    one = MAPS[name]
    if rows > 32:
        yield None
    if rows <= 128:
        yield from streaming_plans(one, rows)
    if rows > 64 and not one.gated:
        yield from wide_streams(one, rows)
    if rows >= 64:
        yield from (
            plan
            for plan in dense_plans(one, rows, most_chunks=MOST_CHUNKS)
            if sum(plan.widths) >= LEAST_WIDTH
        )
    yield plan_of(name, rows)


def wide_streams(one: Map, rows: int) -> Iterator[StreamPlan]:
    """Tiles that are cut along the columns of x, so that few of them occupy the card."""
    for most_rows, stages in ((64, 8), (128, 6)):
        tiles = -(-one.result_size // 128) * -(-rows // most_rows)
        for programs in {SMS, *(tiles * pieces for pieces in (1, 2, 3, 4) if 96 <= tiles * pieces <= SMS)}:
            yield StreamPlan(128, BLOCK, stages, 8, programs, most_rows)


def plan_of(name: str, rows: int) -> Plan | None:
    """As it stands in the table."""
    one = MAPS[name]
    shape = (one.out_size, one.in_size, one.gated)
    return plan_for(torch.device("cuda"), rows, shape, by_block=False, may_stream=True)


def described(plan: Plan | None) -> str:
    if plan is None or isinstance(plan, TilesPlan):
        return "cuBLAS" if plan is None else "tiles"
    return short(plan)


def compile_all(
    layers: Sequence[Layer], rows: Sequence[int], plans: Mapping[int, Mapping[str, Sequence[Plan | None]]]
) -> None:
    """Everything that a search may run, in other processes."""
    number = usable_cpus()
    workers = CompileWorkers.start(number)
    device = layers[0].norm.weight.device
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
    with compiling_ahead(number, workers):
        for num_tokens in rows:
            x = torch.randn(num_tokens, 4096, dtype=torch.bfloat16, device=device)
            for several in itertools.zip_longest(*plans[num_tokens].values()):
                chosen = dict(zip(plans[num_tokens], several, strict=True))
                run_layer(layers[0], x, tickets, chosen)
    if workers is not None:
        workers.close()


def search(
    layers: Sequence[Layer], rows: int, plans: Mapping[str, Sequence[Plan | None]]
) -> tuple[Choice, float]:
    """The best plan of each map, and µs of a layer."""
    best: Choice = {name: plan_of(name, rows) for name in MAPS}
    time_of(layers, rows, best)  # the first graph finds the card at rest
    planned, least = best, time_of(layers, rows, best)
    print(f"{rows} rows as planned: {least:.2f} µs a layer", flush=True)
    for name, several in plans.items():
        times = {}
        for plan in several:
            try:
                times[plan] = time_of(layers, rows, best | {name: plan})
            except Exception as error:  # whatever the compiler says: the other plans go on
                print(f"  {name}: {described(plan)} fails: {str(error).splitlines()[:1]}", flush=True)
        ranking = sorted(times, key=lambda plan: times[plan])
        shown = ", ".join(f"{described(plan)} {times[plan]:.2f}" for plan in ranking)
        print(f"  {name}: {shown}" + (f"; cuBLAS {times[None]:.2f}" if None in times else ""), flush=True)
        if times[ranking[0]] < least:
            best, least = best | {name: ranking[0]}, times[ranking[0]]
    again = {key: time_of(layers, rows, one) for key, one in (("as planned", planned), ("the best", best))}
    print(f"  once more: {', '.join(f'{key} {us:.2f}' for key, us in again.items())}", flush=True)
    return best, least


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 256))
    parser.add_argument("--maps", type=lambda text: tuple(text.split(",")), default=tuple(MAPS))
    own, others = parser.parse_known_args()
    bench = KernelBench("fp8_chain", bench_arguments(__doc__, others))
    if bench.device.type != "cuda":
        raise BenchError("chains are timed on a GPU alone; `fp8_linear` has cases for the interpreter")
    layers = [make_layer(bench.device) for _ in range(LAYERS)]
    plans = {
        rows: {name: list(dict.fromkeys(candidates(name, rows))) for name in own.maps} for rows in own.rows
    }
    compile_all(layers, own.rows, plans)
    for rows in own.rows:
        best, least = search(layers, rows, plans[rows])
        print(f"{rows} rows: {least:.2f} µs a layer; {best}", flush=True)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
