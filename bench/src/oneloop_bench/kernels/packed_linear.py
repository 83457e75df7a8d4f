"""Packed linear maps: unpacked in the product, or written out for cuBLAS, beside the same maps in bfloat16.

`python -m oneloop_bench.kernels.packed_linear [--only TEXT] [--kind KIND] [--rows 1,4,16,64,256]`: the four maps of a
layer of Llama 3 8B at so many rows, then chains of layers without attention, each with weights of its own; norms are
kernels of their own that count too. Kinds: "w4" (4 bits, groups of 128), "w4z" (with zeros), "q4_0", "q4_k", "q6_k",
"q8_0" as GGUF's.

--sweep: plans for each map and number of rows, and at the end lines of
`oneloop_kernels.ops.packed_linear.plans.TUNED`.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop.device.cpus import usable_cpus
from oneloop_bench.kernels import linear as plain
from oneloop_bench.kernels.timing import Effort, KernelBench, add_bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead, num_sms
from oneloop_kernels.ops.linear import NUM_TICKETS, Norm
from oneloop_kernels.ops.linear.gpu import linear as plain_linear
from oneloop_kernels.ops.linear.heads import Surroundings
from oneloop_kernels.ops.linear.plans import can_stream
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS, TILE_ROWS, PackedCall, PackedWeight
from oneloop_kernels.ops.packed_linear.gpu import linear, written_out
from oneloop_kernels.ops.packed_linear.heads import heads, takes
from oneloop_kernels.ops.packed_linear.launches import few_rows, prepared, stream
from oneloop_kernels.ops.packed_linear.plans import StreamPlan, fitting
from oneloop_kernels.ops.rope import ROPE, RotaryStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from oneloop_bench.kernels.linear import Map
    from oneloop_kernels.ops.packed_linear import Bits, Shift

MODEL: Final = "llama8b"
HEAD_DIM: Final = 128
NUM_KV_HEADS: Final = 8
SWEEP_EFFORT: Final = Effort(launches=16, seconds=0.01, replays=5)
KINDS: Final[dict[str, tuple[Bits, Shift, int]]] = {
    "w4": (4, "none", 1),
    "w4z": (4, "zero", 1),
    "q4_0": (4, "none", 4),
    "q4_k": (4, "offset", 4),
    "q6_k": (6, "none", 8),
    "q8_0": (8, "none", 4),
}
"""Bits, shift, groups in 128 columns."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random inputs of one map."""

    map: Map
    call: PackedCall
    around: Surroundings | None = None
    """Of a layer's queries, keys and values: what they are rotated and stored with."""


def by_plan(plan: StreamPlan | None, call: PackedCall, around: Surroundings | None = None) -> torch.Tensor:
    """The call by the plan, as far as shared memory has room for its stages; None: by cuBLAS."""
    if around is not None:
        if plan is not None and takes(plan, call, around):
            return heads(plan, call, around).run().flatten(1)
        return rotated(by_plan(plan, call), around)
    if plan is None:
        return written_out(prepared(call))
    num_tokens = call.x.shape[0]
    call = prepared(call)
    return stream(fitting(plan, call.weight, num_tokens, gated=call.gated), call).run()


def rotated(qkv: torch.Tensor, around: Surroundings) -> torch.Tensor:
    """What the attention takes, by a kernel of its own."""
    by_head = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    ROPE.resolve(qkv.device, qkv.dtype).rotate_and_store(by_head, *around)
    return qkv


def surroundings(num_tokens: int, device: torch.device) -> Surroundings:
    """Of Llama 3 8B, one token a sequence."""
    dtype = plain.dtype_on(device)
    angles = torch.randn(num_tokens, HEAD_DIM, device=device)
    cache = torch.zeros(num_tokens, 2 * NUM_KV_HEADS, 16, HEAD_DIM, dtype=dtype, device=device).transpose(
        1, 2
    )
    rotary = RotaryStep(angles[:, : HEAD_DIM // 2], angles[:, HEAD_DIM // 2 :])
    return Surroundings(rotary, None, cache, torch.arange(num_tokens, device=device) * 16)


def random_weight(one: Map, kind: str, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Any bits are numbers; scales are like those of real weights."""
    bits, shift, groups = KINDS[kind]
    halves = 2 if one.gated else 1
    tiles = (halves * -(-one.out_size // halves // TILE_ROWS), -(-one.in_size // TILE_COLUMNS))

    def integers(*last: int, dtype: torch.dtype) -> torch.Tensor:
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max, (*tiles, *last), dtype=dtype, device=device)

    kinds = 1 if shift == "none" else 2
    scales = torch.rand(*tiles, 32 * groups, kinds, 2, device=device).mul_(0.02 / (1 << (bits - 1)))
    high = None
    if bits > 4:
        high = integers(1024, dtype=torch.int32 if bits == 8 else torch.int16)
    params = scales.to(dtype).view(torch.int32).squeeze(-1)
    words = integers(1024, dtype=torch.int32)
    return PackedWeight(words, high, params, bits, shift, one.out_size, one.in_size, halves, dtype)


def make_inputs(
    one: Map, num_tokens: int, kind: str, device: torch.device, x: torch.Tensor | None = None
) -> Inputs:
    """x: shared by several maps of a chain: what they normalise, and add their results to."""
    dtype = plain.dtype_on(device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    own = normal(num_tokens, one.in_size) if x is None else x
    residual = normal(num_tokens, one.result_size) if x is None else x
    call = PackedCall(
        own,
        random_weight(one, kind, dtype, device),
        norm=Norm(normal(one.in_size), 1e-5) if one.norm else None,
        gated=one.gated,
        residual=residual if one.residual else None,
        tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device),
    )
    in_layer = x is not None and one.name == "qkv" and device.type == "cuda"
    return Inputs(one, call, surroundings(num_tokens, device) if in_layer else None)


def num_bytes_of(one: Map, num_tokens: int, weight: PackedWeight) -> int:
    """As Map.num_bytes."""
    return weight.num_bytes + one.num_bytes(num_tokens) - 2 * one.out_size * one.in_size


def candidates(one: Map, num_tokens: int, device: torch.device) -> Iterator[StreamPlan]:
    """Plans worth a try: as many programs to a tile, or tiles to a program, as find room; also so many that the next
    kernel's find room beside them, and begin before these have ended."""
    few = num_tokens <= 16
    for residents in (2, 3, 4) if few else (1, 2, 3) if num_tokens <= 32 else (1, 2):
        plan = StreamPlan(1, 16, residents, most_rows=64 if num_tokens <= 64 else 128)
        ways = [plan, replace(plan, column_tiles=2)]
        if few:
            ways.append(replace(plan, slices=True))
        if num_tokens > 64:
            ways += [replace(way, most_rows=64) for way in ways]
        for way, slots in itertools.product(ways, range(max(1, residents - 2), residents + 1)):
            tiles, room = way.num_tiles(num_tokens, one.result_size), slots * num_sms(device)
            programs = tiles * (room // tiles) if tiles <= room else -(-tiles // -(-tiles // room))
            yield replace(way, programs=min(tiles, room) if way.slices else programs)


def compile_all(trials: Sequence[tuple[StreamPlan, Inputs]], device: torch.device) -> None:
    """Several at a time. One that does not compile says so when it is launched."""
    if device.type != "cuda":
        return
    workers = CompileWorkers.start(usable_cpus())
    try:
        with compiling_ahead(usable_cpus(), workers):
            for plan, inputs in trials:
                try:
                    by_plan(plan, inputs.call, inputs.around)
                except Exception as error:  # whatever the compiler says: the others go on
                    print(f"  {inputs.map.name}: {str(error)[:200]}")
    finally:
        if workers is not None:
            workers.close()


def sweep(
    bench: KernelBench,
    maps: Sequence[Map],
    rows: Sequence[int],
    kind: str,
    tried: Callable[[Map, int, torch.device], Iterator[StreamPlan]] = candidates,
    *,
    turns: int = 2,
) -> dict[Map, list[tuple[int, StreamPlan | None]]]:
    """The best plan for each map and number of rows, in layers whose other maps have the best ones so far: how soon a
    kernel can begin depends on what the one before it leaves free. Twice, as the first choices were beside others."""
    rows = [num_tokens for num_tokens in rows if bench.wanted(f"{MODEL} {num_tokens:03d} rows {kind}")]
    plans = {(one, count): list(tried(one, count, bench.device)) for one in maps for count in rows}
    samples = {key: make_inputs(*key, kind, bench.device) for key in plans}
    for (one, count), inputs in samples.items():
        if one.name == "qkv":
            samples[one, count] = replace(inputs, around=surroundings(count, bench.device))
    compile_all([(plan, samples[key]) for key in plans for plan in plans[key]], bench.device)
    found: dict[Map, list[tuple[int, StreamPlan | None]]] = {one: [] for one in maps}
    for num_tokens in rows:
        layers, num_bytes = chain(bench, maps, num_tokens, kind)
        chosen: dict[Map, StreamPlan | None] = {one: plans[one, num_tokens][0] for one in maps}
        for one in tuple(maps) * turns:
            known: dict[str, StreamPlan | None] = {short(plan): plan for plan in plans[one, num_tokens]}
            known["out"] = None
            trials: dict[str, Callable[[list[Inputs]], object]] = {
                name: partial(run_layer, plans={**chosen, one: plan}) for name, plan in known.items()
            }
            name = f"{MODEL} layer, {one.name} {num_tokens:03d} rows {kind}"
            best = bench.best(name, trials, layers, num_bytes=num_bytes)
            if best is not None:
                print(f"{bench.rows[-1].us:>9.2f} µs {bench.rows[-1].name}", flush=True)
                chosen[one] = known[best]
        for one, plan in chosen.items():
            weight = samples[one, num_tokens].call.weight
            fitted = None if plan is None else fitting(plan, weight, num_tokens, gated=one.gated)
            found[one].append((num_tokens, fitted))
    return found


def short(plan: StreamPlan) -> str:
    """A name for the table."""
    tile = "slices" if plan.slices else f"tiles {plan.column_tiles} rows {plan.most_rows}"
    return f"{tile} residents {plan.residents} programs {plan.programs}"


def compare(bench: KernelBench, maps: Sequence[Map], rows: Sequence[int], kind: str) -> None:
    """What the family takes, the other ways, and bfloat16."""
    for one, num_tokens in itertools.product(maps, rows):
        name = f"{MODEL} {one.name} {num_tokens:03d} rows"
        sample = make_inputs(one, num_tokens, kind, bench.device)
        num_bytes = num_bytes_of(one, num_tokens, sample.call.weight)
        sets = bench.sets(lambda: make_inputs(one, num_tokens, kind, bench.device), num_bytes=num_bytes)  # noqa: B023
        bench.measure(f"{name} {kind}", lambda inputs: linear(inputs.call), sets, num_bytes=num_bytes)
        bench.measure(
            f"{name} {kind} out", lambda inputs: by_plan(None, inputs.call), sets, num_bytes=num_bytes
        )
        if not can_stream(bench.device):
            bench.measure(
                f"{name} {kind} any card", lambda inputs: few_rows(prepared(inputs.call)).run(), sets
            )
        num_bytes = one.num_bytes(num_tokens)
        others = bench.sets(lambda: plain.make_inputs(one, num_tokens, bench.device), num_bytes=num_bytes)  # noqa: B023
        bench.measure(f"{name} bf16", lambda inputs: plain_linear(inputs.call()), others, num_bytes=num_bytes)


def chains(bench: KernelBench, maps: Sequence[Map], rows: Sequence[int], kind: str) -> None:
    """Whole layers in one graph: a decode step without attention and head is 32 of them. Rotation is in them."""
    for num_tokens in rows:
        name = f"{MODEL} layers {num_tokens:03d} rows {kind}"
        if bench.wanted(name):
            layers, num_bytes = chain(bench, maps, num_tokens, kind)
            bench.measure(name, run_layer, layers, num_bytes=num_bytes)


def chain(
    bench: KernelBench, maps: Sequence[Map], num_tokens: int, kind: str
) -> tuple[list[list[Inputs]], int]:
    """Layers, with weights of their own, and how many bytes one touches."""
    x = torch.randn(num_tokens, maps[0].in_size, dtype=plain.dtype_on(bench.device), device=bench.device)

    def layer() -> list[Inputs]:
        return [make_inputs(one, num_tokens, kind, bench.device, x) for one in maps]

    num_bytes = sum(num_bytes_of(one.map, num_tokens, one.call.weight) for one in layer())
    return bench.sets(layer, num_bytes=num_bytes), num_bytes


def run_layer(layer: Sequence[Inputs], plans: Mapping[Map, StreamPlan | None] | None = None) -> None:
    """The four maps one after the other; o takes the queries as they are. plans: None: those that the family takes."""
    x = layer[0].call.x
    for inputs in layer:
        call = inputs.call._replace(x=x[:, : inputs.map.in_size])
        if plans is not None:
            x = by_plan(plans[inputs.map], call, inputs.around)
        elif inputs.around is None:
            x = linear(call)
        else:
            qkv = ROPE.resolve(x.device, x.dtype).project_and_store(call, *inputs.around)
            x = rotated(linear(call), inputs.around) if qkv is None else qkv.flatten(1)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_arguments(parser)
    parser.add_argument("--kind", choices=sorted(KINDS), default="w4")
    parser.add_argument("--rows", default="1,4,16,64,256")
    options = parser.parse_args()
    bench = KernelBench("packed_linear", options)
    rows = [int(number) for number in options.rows.split(",")]
    bench.sweep_effort = SWEEP_EFFORT
    maps: tuple[Map, ...] = plain.MODELS[MODEL][:4]
    if bench.device.type != "cuda":
        maps = tuple(plain.shrunken(one) for one in maps)
        rows = rows[:2]
    lines: list[str] = []
    if bench.sweep and bench.device.type == "cuda":
        lines = [
            f"    ({one.out_size}, {one.in_size}, {one.gated}): {tuple(choices)!r},"
            for one, choices in sweep(bench, maps, rows, options.kind).items()
        ]
        print("\n".join(lines))
    else:
        chains(bench, maps, rows, options.kind)
        compare(bench, maps, rows, options.kind)
    bench.finish(tuned=lines)


if __name__ == "__main__":
    run_bench(main)
