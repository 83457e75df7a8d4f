"""How the kernels' micro-benches measure and print: graph replays over rotating inputs, a table, one JSON object.

    args = bench_arguments(__doc__)
    bench = KernelBench("rms_norm", args)
    sets = bench.sets(make_inputs, num_bytes=bytes_of_one_set)      # make_inputs() -> a set of random inputs
    bench.measure("4096 x 4096", launch, sets, num_bytes=…, num_flops=…)     # launch(one set) -> anything
    bench.finish()

A launch must be capturable: no synchronisation, no host value that changes. Under Triton's interpreter (or with
--smoke) every launch runs a few times under the wall clock: that shows that a bench works, the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from oneloop_bench.report import BenchError, machine
from oneloop_kernels.launch import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

MAX_REPLAYS = 200
L2_MULTIPLE = 2.5
"""All input sets together are this many times the L2 cache."""
MAX_SETS = 256
MAX_SET_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one measurement takes.

    launches: in one captured graph, at least, so that the cost of starting it is spread over them. seconds: of replays.
    replays: at least.
    """

    launches: int = 64
    seconds: float = 0.15
    replays: int = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card can do. The defaults were measured on one H200 (../shared/anchors' limits)."""

    bandwidth: float = 4.3e12
    """Bytes per second, read or read + written."""
    bf16: float = 7.5e14
    """FLOP per second of a large bf16 matrix product on random data."""
    measured: bool = False
    """Whether this run measured them."""

    @classmethod
    def measure(cls) -> Ceilings:
        """Copy 2 GiB and multiply 8192³ in bf16, on random data; takes about a second on an H200."""
        return cls(_copy_rate(), _product_rate(), measured=True)


def _copy_rate() -> float:
    """Read + written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(event_times(lambda: target.copy_(source), 20))


def fp8_rate() -> float:
    """FLOP per second of a large product of 8-bit numbers, by cuBLAS with one scale for each side."""
    left, right = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * 8192**3 / statistics.median(event_times(multiply, 20))


def _product_rate() -> float:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * 8192**3 / statistics.median(event_times(lambda: torch.mm(left, right, out=product), 20))


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one launch."""

    us: float
    """Median over the replays."""
    spread: float
    """(90th − 10th percentile) / median: what a difference must exceed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Rates are None where the caller counted nothing."""

    name: str
    us: float
    spread: float
    gb_s: float | None
    tflop_s: float | None
    share: float | None
    """Of the nearer ceiling: the larger of the two floors over the measured time."""
    extra: dict[str, Any]


def bench_arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of every micro-bench: json, sweep, only, bandwidth, tflops, measure_ceilings, smoke."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_bench_arguments(parser)
    return parser.parse_args(argv)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The same, for a bench that has more of its own."""
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument(
        "--sweep", action="store_true", help="try the kernels' configurations, print the best"
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this (a|b: or that)")
    parser.add_argument("--bandwidth", type=float, help="ceiling in GB/s")
    parser.add_argument("--tflops", type=float, help="ceiling of bf16 products in TFLOP/s")
    parser.add_argument("--measure-ceilings", action="store_true", help="measure both first (about 1 s)")
    parser.add_argument("--smoke", action="store_true", help="run everything a few times, measure nothing")


def bench_device() -> torch.device:
    """The GPU; without one the CPU, where Triton interprets. BenchError where nothing runs kernels."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not INTERPRETED:
        raise BenchError(
            "kernels need an NVIDIA GPU, and this process can use none; with TRITON_INTERPRET=1 a few small cases run "
            "on the CPU, which shows that the bench works"
        )
    return torch.device("cpu")


class KernelBench:
    """Collects the rows of one family's bench and prints them."""

    def __init__(self, family: str, arguments: argparse.Namespace) -> None:
        self.family = family
        self.device = bench_device()
        self.sweep: bool = arguments.sweep
        self.smoke: bool = arguments.smoke or self.device.type == "cpu"
        self.rows: list[Row] = []
        self.sweep_effort: Effort | None = None
        """Of `best`; None: that of all."""
        self._only: str = arguments.only
        self._json: Path | None = arguments.json
        self._started = time.perf_counter()
        ceilings = Ceilings.measure() if arguments.measure_ceilings and not self.smoke else Ceilings()
        if arguments.bandwidth:
            ceilings = replace(ceilings, bandwidth=arguments.bandwidth * 1e9)
        if arguments.tflops:
            ceilings = replace(ceilings, bf16=arguments.tflops * 1e12)
        self.ceilings = ceilings

    def wanted(self, name: str) -> bool:
        """Whether --only asks for this case."""
        return any(text in name for text in self._only.split("|"))

    def sets(self, make: Callable[[], T], *, num_bytes: int) -> list[T]:
        """As many input sets as pass the L2 cache by far; make() returns one, of num_bytes that a launch touches.

        Sets of a few KB stay in the cache whatever is done (at most 256 are made), as they do in a real step.
        """
        return [make() for _ in range(1 if self.smoke else num_sets(num_bytes))]

    def measure(
        self,
        name: str,
        launch: Callable[[T], object],
        sets: Sequence[T],
        *,
        num_bytes: float = 0,
        num_flops: float = 0,
        **extra: Any,
    ) -> Row | None:
        """Time launch(set) and add a row; None when --only leaves this name out.

        num_bytes: the fewest bytes a launch must move (each input read once, each output written once). num_flops: its
        floating-point operations. extra: more columns of the JSON.
        """
        if not self.wanted(name):
            return None
        timing = time_launches(launch, sets, smoke=self.smoke)
        self.rows.append(self._row(name, timing, num_bytes, num_flops, extra))
        return self.rows[-1]

    def best(
        self,
        name: str,
        candidates: dict[str, Callable[[T], object]],
        sets: Sequence[T],
        *,
        num_bytes: float = 0,
        num_flops: float = 0,
    ) -> str | None:
        """--sweep: time every candidate, add the fastest as a row (with the runner-up), return its key.

        A candidate that does not compile or does not fit is reported and left out. None when none works.
        """
        times: dict[str, Timing] = {}
        for key, launch in candidates.items():
            try:
                times[key] = time_launches(launch, sets, smoke=self.smoke, effort=self.sweep_effort)
            except Exception as error:  # whatever the compiler says: the other candidates go on
                print(f"  {name}: {key} fails: {str(error).splitlines()[0] if str(error) else error!r}")
        if not times:
            return None
        ranking = sorted(times, key=lambda key: times[key].us)
        winner = ranking[0]
        next_us = {"second": ranking[1], "second_us": times[ranking[1]].us} if len(ranking) > 1 else {}
        extra = {"config": winner, **next_us}
        self.rows.append(self._row(f"{name} [{winner}]", times[winner], num_bytes, num_flops, extra))
        return winner

    def finish(self, **extra: Any) -> None:
        """Print the table and, as the last line, the JSON object; write it to --json."""
        self._print_table()
        result = {
            "family": self.family,
            "smoke": self.smoke,
            "ceilings": {
                "bandwidth_gb_s": round(self.ceilings.bandwidth / 1e9, 1),
                "bf16_tflop_s": round(self.ceilings.bf16 / 1e12, 1),
                "measured": self.ceilings.measured,
            },
            "rows": [_json_row(row) for row in self.rows],
            "seconds": round(time.perf_counter() - self._started, 2),
            **extra,
            "machine": device_machine(),
        }
        line = json.dumps(result)
        if self._json is not None:
            self._json.parent.mkdir(parents=True, exist_ok=True)
            self._json.write_text(line + "\n", encoding="utf-8")
        print(line)

    def _row(
        self, name: str, timing: Timing, num_bytes: float, num_flops: float, extra: dict[str, Any]
    ) -> Row:
        seconds = timing.us * 1e-6
        floor_s = max(num_bytes / self.ceilings.bandwidth, num_flops / self.ceilings.bf16)
        return Row(
            name,
            timing.us,
            timing.spread,
            num_bytes / seconds / 1e9 if num_bytes else None,
            num_flops / seconds / 1e12 if num_flops else None,
            floor_s / seconds if floor_s else None,
            extra,
        )

    def _print_table(self) -> None:
        width = max([len(row.name) for row in self.rows] + [len(self.family)])
        note = " (smoke run: the figures mean nothing)" if self.smoke else ""
        print(f"{self.family:<{width}} {'µs':>10} {'±%':>5} {'GB/s':>7} {'TFLOP/s':>8} {'share':>6}{note}")
        for row in self.rows:
            gb_s = "" if row.gb_s is None else f"{row.gb_s:.0f}"
            tflop_s = "" if row.tflop_s is None else f"{row.tflop_s:.1f}"
            share = "" if row.share is None else f"{row.share:.0%}"
            us = f"{row.us:>10.2f} {50 * row.spread:>5.1f}"
            print(f"{row.name:<{width}} {us} {gb_s:>7} {tflop_s:>8} {share:>6}")


def num_sets(num_bytes: int) -> int:
    """How many input sets of num_bytes each pass the L2 cache by far: from 2 to 256, 16 GiB at most in all."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = math.ceil(L2_MULTIPLE * cache / max(num_bytes, 1)) + 1
    return max(2, min(wanted, MAX_SETS, MAX_SET_BYTES // max(num_bytes, 1)))


def time_launches(
    launch: Callable[[T], object], sets: Sequence[T], *, smoke: bool = False, effort: Effort | None = None
) -> Timing:
    """Time of one launch: median over the replays of a graph that launches on every set in turn."""
    if smoke:
        return _wall_timing(launch, sets)
    effort = effort or Effort()
    graph, num_launches = _capture(launch, sets, effort.launches)
    graph.replay()
    torch.cuda.synchronize()
    once = statistics.median(event_times(graph.replay, 3))
    count = min(MAX_REPLAYS, max(effort.replays, int(effort.seconds / once)))
    times = sorted(event_times(graph.replay, count))
    median = statistics.median(times)
    low, high = times[len(times) // 10], times[(9 * len(times)) // 10]
    return Timing(median / num_launches * 1e6, (high - low) / median)


def _capture(
    launch: Callable[[T], object], sets: Sequence[T], least: int
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of launches on all sets, round after round. Kernels are compiled and libraries loaded before.

    The results of a whole round are kept meanwhile: each launch writes to other memory than those shortly before, so
    that what it writes is not found in the L2 cache either.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for one in sets[:3]:
            launch(one)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = math.ceil(least / len(sets))
    results: deque[object] = deque(maxlen=len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for one in sets:
                results.append(launch(one))
    return graph, rounds * len(sets)


def event_times(work: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` runs, by device events; the host does not wait in between."""
    for _ in range(3):
        work()
    pairs = [(_event(), _event()) for _ in range(count)]
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _wall_timing(launch: Callable[[T], object], sets: Sequence[T]) -> Timing:
    times = []
    for _ in range(2):
        for one in sets:
            begin = time.perf_counter()
            launch(one)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return Timing(median * 1e6, (max(times) - min(times)) / median)


def _json_row(row: Row) -> dict[str, Any]:
    def rounded(value: float | None, digits: int) -> float | None:
        return None if value is None else round(value, digits)

    return {
        "name": row.name,
        "us": round(row.us, 3),
        "spread": round(row.spread, 4),
        "gb_s": rounded(row.gb_s, 1),
        "tflop_s": rounded(row.tflop_s, 2),
        "share": rounded(row.share, 4),
        **row.extra,
    }


def device_machine() -> dict[str, Any]:
    """The machine with its accelerator, torch and Triton's cache state, for the JSON."""
    found = {**machine(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["triton"] = "interpreter"
    return found
