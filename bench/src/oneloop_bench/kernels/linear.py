"""Linear maps of a decode step: one kernel with all around it against norm, cuBLAS and activation one after the other.

`python -m oneloop_bench.kernels.linear [--only TEXT]`: every map of the models at 1, 8, 32 and 128 rows, then chains of
layers without attention, each layer with weights of its own. Names: "llama8b gate_up 08 rows fused" and "… apart";
"llama8b layers 01 rows fused", "… fused, one by one" (without programmatic dependent launch), "… apart". Where the plan
streams, the norm is a kernel of its own that counts too. Where the plan is cuBLAS, "fused" is "apart".

--sweep: plans for each map and number of rows, and at the end lines of `oneloop_kernels.ops.linear.plans.TUNED`. A map
takes about 5 s per number of rows: narrow it with --only, by its name ("llama8b down 04 rows"). What is best in a chain
may differ a little: it depends on how much of a multiprocessor the kernels before and after leave.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.linear import NUM_TICKETS, LinearCall, Norm
from oneloop_kernels.ops.linear.gpu import many_rows
from oneloop_kernels.ops.linear.launches import planned
from oneloop_kernels.ops.linear.plans import (
    DENSE_BLOCK_K,
    DensePlan,
    FewRowsPlan,
    StreamPlan,
    can_stream,
    plan_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from oneloop_kernels.ops.linear.launches import Launch
    from oneloop_kernels.ops.linear.plans import Plan

ROWS: Final = (1, 8, 32, 128)
SWEEP_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHAIN_ROWS: Final = (1, 4, 8, 16, 32, 64, 128, 256)
COMPILE_THREADS: Final = 12
SMOKE_DIVISOR: Final = 32
"""Sizes are divided by this where there is no GPU: the interpreter is slow."""
MAX_SHARED_BYTES: Final = 220 << 10
MIN_DENSE_ROWS: Final = 64
WIDEST_PRODUCT: Final = 256
"""Weights that one product of the tensor cores takes; more sums than that find no room in the registers either."""
SMS: Final = 132
"""Multiprocessors of the cards that stream."""


@dataclass(frozen=True, slots=True)
class Map:
    """One linear map of a model. out_size: rows of its weight."""

    name: str
    out_size: int
    in_size: int
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def result_size(self) -> int:
        """Columns of the result."""
        return self.out_size // 2 if self.gated else self.out_size

    def num_bytes(self, num_tokens: int) -> int:
        """Weights, input and result, each once; the residual twice."""
        rows = self.in_size + self.result_size * (2 if self.residual else 1)
        return 2 * (self.out_size * self.in_size + num_tokens * rows)


MODELS: Final = {
    "llama8b": (
        Map("qkv", 6144, 4096, norm=True),
        Map("o", 4096, 4096, residual=True),
        Map("gate_up", 28672, 4096, norm=True, gated=True),
        Map("down", 4096, 14336, residual=True),
        Map("head", 128256, 4096, norm=True),
    ),
    "qwen06b": (
        Map("qkv", 4096, 1024, norm=True),
        Map("o", 1024, 2048, residual=True),
        Map("gate_up", 6144, 1024, norm=True, gated=True),
        Map("down", 1024, 3072, residual=True),
        Map("head", 151936, 1024, norm=True),
    ),
    "qwen30ba3b": (
        Map("qkv", 5120, 2048, norm=True),
        Map("o", 2048, 4096, residual=True),
        Map("head", 151936, 2048, norm=True),
    ),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random inputs of one map."""

    map: Map
    x: torch.Tensor
    weight: torch.Tensor
    norm: Norm | None
    residual: torch.Tensor | None
    tickets: torch.Tensor

    def fused(self, plan: Plan, x: torch.Tensor | None = None) -> Launch:
        """x: instead of the own one. Where the plan streams, the norm is launched at once."""
        return planned(plan, self.call(x))

    def apart(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """x: instead of the own one."""
        return many_rows(self.call(x))

    def call(self, x: torch.Tensor | None = None) -> LinearCall:
        """x: instead of the own one."""
        return LinearCall(
            self.x if x is None else x,
            self.weight,
            norm=self.norm,
            gated=self.map.gated,
            residual=self.residual,
            tickets=self.tickets,
        )


def dtype_on(device: torch.device) -> torch.dtype:
    """The interpreter computes bfloat16 wrongly."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def make_inputs(one: Map, num_tokens: int, device: torch.device, x: torch.Tensor | None = None) -> Inputs:
    """x: shared by several maps of a chain: what they normalise, and add their results to."""
    dtype = dtype_on(device)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).mul_(scale)

    residual = normal(num_tokens, one.result_size) if x is None else x
    return Inputs(
        one,
        normal(num_tokens, one.in_size) if x is None else x,
        normal(one.out_size, one.in_size, scale=0.02),
        Norm(normal(one.in_size), 1e-5) if one.norm else None,
        residual if one.residual else None,
        torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device),
    )


def plan_of(inputs: Inputs) -> Plan | None:
    """What the family would take."""
    x, shape = inputs.x, (inputs.map.out_size, inputs.map.in_size, inputs.map.gated)
    return plan_for(x.device, x.dtype, x.shape[0], shape, may_split=True, may_stream=True)


def compile_all(launches: Sequence[Launch]) -> None:
    """In parallel. Those that do not compile say so when they are launched."""
    if launches and launches[0].out.device.type == "cuda":
        from triton.runtime._async_compile import AsyncCompileMode

        with (
            ThreadPoolExecutor(COMPILE_THREADS) as threads,
            AsyncCompileMode(threads, ignore_errors=True),
        ):
            for launch in launches:
                launch.compile()


def compare(bench: KernelBench, model: str, one: Map) -> None:
    """Fused and apart at every number of rows."""
    for num_tokens in ROWS:
        name = f"{model} {one.name} {num_tokens:02d} rows"
        if not (bench.wanted(f"{name} fused") or bench.wanted(f"{name} apart")):
            continue
        num_bytes = one.num_bytes(num_tokens)
        sets = bench.sets(lambda: make_inputs(one, num_tokens, bench.device), num_bytes=num_bytes)  # noqa: B023
        plan = plan_of(sets[0])
        if plan is not None:
            chosen = plan
            bench.measure(
                f"{name} fused",
                lambda one_set: one_set.fused(chosen).run(),  # noqa: B023
                sets,
                num_bytes=num_bytes,
                plan=repr(plan),
            )
        bench.measure(f"{name} apart", lambda one_set: one_set.apart(), sets, num_bytes=num_bytes)


class Layer:
    """The four maps of a decoder layer on one x, without attention: o takes the queries as they are."""

    def __init__(self, maps: Sequence[Map], x: torch.Tensor) -> None:
        num_tokens, device = x.shape[0], x.device
        self.maps = tuple(make_inputs(one, num_tokens, device, x) for one in maps)
        self.plans = tuple(plan_of(inputs) for inputs in self.maps)

    def fused(self, *, pdl: bool = True) -> None:
        """By the family's plans. pdl: each kernel may begin while the one before it ends, where the device can."""
        x = self.maps[0].x
        for inputs, plan in zip(self.maps, self.plans, strict=True):
            if plan is None:
                x = inputs.apart(x[:, : inputs.map.in_size].contiguous())
                continue
            launch = inputs.fused(plan, x[:, : inputs.map.in_size])
            if not pdl:
                launch = replace(launch, constants=launch.constants | {"USE_PDL": False, "launch_pdl": False})
            x = launch.run()

    def apart(self) -> None:
        """By cuBLAS."""
        x = self.maps[0].x
        for inputs in self.maps:
            x = inputs.apart(x[:, : inputs.map.in_size].contiguous())


def chains(bench: KernelBench, model: str, maps: Sequence[Map]) -> None:
    """Whole layers in one graph; the rate is that of a decode step without attention and head."""
    for num_tokens in CHAIN_ROWS:
        name = f"{model} layers {num_tokens:02d} rows"
        ways: dict[str, Callable[[Layer], None]] = {
            f"{name} fused": lambda layer: layer.fused(),
            f"{name} fused, one by one": lambda layer: layer.fused(pdl=False),
            f"{name} apart": lambda layer: layer.apart(),
        }
        if not any(bench.wanted(way) for way in ways):
            continue
        x = torch.randn(num_tokens, maps[0].in_size, dtype=dtype_on(bench.device), device=bench.device)
        num_bytes = sum(one.num_bytes(num_tokens) for one in maps[:-1])
        layers = bench.sets(lambda: Layer(maps[:-1], x), num_bytes=num_bytes)  # noqa: B023
        for way, launch in ways.items():
            bench.measure(way, launch, layers, num_bytes=num_bytes)


def candidates(one: Map, num_tokens: int, *, streaming: bool) -> Iterator[Plan]:
    """Plans worth a try. streaming: whether the card can."""
    if num_tokens <= 4:
        yield from register_plans(one, num_tokens)
    if streaming and num_tokens >= MIN_DENSE_ROWS:
        yield from dense_plans(one, num_tokens)
    if streaming:
        yield from streaming_plans(one, num_tokens)
    elif num_tokens >= 2:
        yield from dot_plans(one, num_tokens)


def register_plans(one: Map, num_tokens: int) -> Iterator[FewRowsPlan]:
    """What a thread holds fits its registers, programs fill the card."""
    halves = 2 if one.gated else 1
    for block_n, (block_k, warps), split in itertools.product(
        (1, 2, 4, 8, 16), ((512, 2), (512, 4), (1024, 4), (2048, 8), (1024, 2)), (1, 2, 4)
    ):
        loaded = block_n * halves * block_k // (32 * warps)
        programs = -(-one.result_size // block_n) * split
        fits = 16 <= loaded <= 128 and loaded * max(1, num_tokens // 2) <= 128
        few = programs >= 260 and (split == 1 or programs <= 1100)
        if fits and few and block_k * split <= one.in_size:
            yield FewRowsPlan(use_dot=False, block_n=block_n, block_k=block_k, split_k=split, num_warps=warps)


def dot_plans(one: Map, num_tokens: int) -> Iterator[FewRowsPlan]:
    """Tiles fit shared memory, programs fill the card."""
    halves = 2 if one.gated else 1
    for block_n, (block_k, stages), split in itertools.product(
        (16, 32, 64, 128), ((64, 6), (128, 4), (128, 6), (256, 3)), (1, 2, 4, 8)
    ):
        shared = (block_n * halves + max(8, num_tokens)) * block_k * 2 * stages
        programs = -(-one.result_size // block_n) * split
        deep = one.in_size // split >= 2 * block_k
        few = split == 1 or programs <= 800
        if shared <= MAX_SHARED_BYTES and deep and programs >= 100 and few:
            warps = 8 if block_n * max(16, num_tokens) > 4096 else 4
            yield FewRowsPlan(
                use_dot=True,
                block_n=block_n,
                block_k=block_k,
                split_k=split,
                num_stages=stages,
                num_warps=2 if block_n == 16 else warps,
                prefetch=512,
            )


def streaming_plans(one: Map, num_tokens: int) -> Iterator[StreamPlan]:
    """Shared memory is full, or half of it; sums fit the registers; tiles are whole or cut into few pieces."""
    halves = 2 if one.gated else 1
    for block_n, shared, warps, rows in itertools.product(
        (64, 128), (104 << 10, 208 << 10), (4, 8), (8, 16, 32, 64, 128)
    ):
        sums = halves * block_n * rows // (32 * warps)
        stages = shared // ((halves * block_n + rows) * 256)
        fits = (32 if warps == 8 else 1) <= sums <= 32 * warps // 2 and not (block_n == 128 and rows > 32)
        if rows > max(8, num_tokens) or rows * 16 < num_tokens or not fits or not 3 <= stages <= 12:
            continue
        for programs in grids(-(-one.result_size // block_n) * -(-num_tokens // rows), one.in_size):
            if programs <= 132 or shared == 104 << 10:
                yield StreamPlan(block_n, 128, stages, warps, programs, rows)


def dense_plans(one: Map, num_tokens: int, *, most_chunks: int = 8) -> Iterator[DensePlan]:
    """Chunks of which every multiprocessor has the same number, at most so many, and a few round ones; all of shared
    memory. For numbers of 16 bits and of 8: a stage has as many bytes of each row.
    """
    halves = 2 if one.gated else 1
    block_m = 64 if num_tokens <= 64 else 128
    most = SMS // -(-num_tokens // block_m)
    sizes = {-(-one.result_size // (most * each)) for each in range(1, most_chunks + 1)} | {64, 128}
    chosen = {widths for size in sizes if (widths := widths_of(size, WIDEST_PRODUCT // halves)) is not None}
    for widths in sorted(chosen, reverse=True):
        stage_bytes = 2 * (halves * sum(widths) + block_m) * DENSE_BLOCK_K
        stages = min(12, (MAX_SHARED_BYTES - block_m * max(widths)) // stage_bytes)
        if stages >= 3:
            yield DensePlan(widths, stages, block_m)


def widths_of(size: int, most: int) -> tuple[int, ...] | None:
    """Powers of two from 8 on, three at most, that add up to a little more than size; None: they exceed most."""
    for unit in (8, 16, 32, 64, 128):
        padded = -(-size // unit) * unit
        widths = tuple(1 << bit for bit in reversed(range(padded.bit_length())) if padded >> bit & 1)
        if len(widths) <= 3:
            return widths if padded <= most else None
    return None


def grids(num_tiles: int, in_size: int) -> list[int]:
    """Numbers of programs with so many whole tiles each, or so many programs to a tile."""
    pieces = {
        num_tiles * n
        for n in (1, 2, 3, 4, 6, 8, 9)
        if num_tiles * n <= 264 and (n == 1 or in_size // n >= 256)
    }
    several = {-(-num_tiles // n) for n in range(2, 9)}
    return sorted(n for n in pieces | several if n >= 40 and (n in pieces or 60 <= n <= 132))


def sweep(bench: KernelBench, model: str, one: Map, full: Map) -> list[tuple[int, Plan | None]]:
    """The best plan (None: apart) for each number of rows that --only asks for. full: the map in its real size."""
    found: list[tuple[int, Plan | None]] = []
    streaming = can_stream(bench.device)
    for num_tokens in SWEEP_ROWS:
        name = f"{model} {one.name} {num_tokens:02d} rows"
        if not bench.wanted(name):
            continue
        num_bytes = one.num_bytes(num_tokens)
        sets = bench.sets(lambda: make_inputs(one, num_tokens, bench.device), num_bytes=num_bytes)  # noqa: B023
        tried = candidates(full, num_tokens, streaming=streaming)
        plans: dict[str, Plan | None] = {short(plan): plan for plan in tried}
        if bench.device.type != "cuda":
            plans = dict(list(plans.items())[:: max(1, len(plans) // 2)])
        compile_all([sets[0].fused(plan) for plan in plans.values() if plan is not None])
        plans["apart"] = None
        best = bench.best(name, {key: way(plan) for key, plan in plans.items()}, sets, num_bytes=num_bytes)
        if best is None:
            continue
        winner = plans[best]
        if isinstance(winner, FewRowsPlan) and winner.use_dot:
            ahead: dict[str, Plan] = {
                f"{best} prefetch {n}": replace(winner, prefetch=n) for n in (0, 512, 1024, 2048)
            }
            key = bench.best(name, {key: way(plan) for key, plan in ahead.items()}, sets, num_bytes=num_bytes)
            winner = ahead.get(key or "", winner)
        found.append((num_tokens, winner))
    return found


def way(plan: Plan | None) -> Callable[[Inputs], object]:
    """How a set is computed by the plan."""
    if plan is None:
        return lambda one_set: one_set.apart()
    return lambda one_set: one_set.fused(plan).run()


def short(plan: Plan) -> str:
    """A name for the table."""
    if isinstance(plan, StreamPlan):
        tile = f"{plan.block_n}x{plan.block_k}/{plan.num_stages}"
        return f"stream {tile} warps {plan.num_warps} programs {plan.programs} rows {plan.most_rows}"
    if isinstance(plan, DensePlan):
        return f"dense {'+'.join(map(str, plan.widths))}/{plan.num_stages}"
    body = f"dot/{plan.num_stages}" if plan.use_dot else "registers"
    return f"{body} {plan.block_n}x{plan.block_k} split {plan.split_k} warps {plan.num_warps}"


def shrunken(one: Map) -> Map:
    """The map in a size that the interpreter can do."""
    return replace(one, out_size=one.out_size // SMOKE_DIVISOR, in_size=one.in_size // SMOKE_DIVISOR)


def main() -> None:
    """Run the bench."""
    bench = KernelBench("linear", bench_arguments(__doc__))
    lines = []
    for model, full in MODELS.items():
        maps = full if bench.device.type == "cuda" else tuple(shrunken(one) for one in full)
        if not bench.sweep:
            chains(bench, model, maps)
        for one, real in zip(maps, full, strict=True):
            if bench.sweep:
                found = sweep(bench, model, one, real)
                lines.append(f"    ({one.out_size}, {one.in_size}, {one.gated}): {tuple(found)!r},")
            else:
                compare(bench, model, one)
    print("\n".join(lines))
    bench.finish(tuned=lines)


if __name__ == "__main__":
    run_bench(main)
