"""The kernel table: what each kernel family reaches of what the card can do, measured in the same run.

    python -m oneloop_bench.kernels.table [--json FILE] [--budget SECONDS] [--only TEXT]

On one GPU, with nothing compiled before, in about a minute and a half: kernels are compiled by processes beside this
one, then every case is timed as a graph of launches over as many sets of random inputs as pass the L2 cache. What does
not fit the budget is left out, and said. `python -m oneloop_bench.page FILE` puts the results into bench/. Under
Triton's interpreter (or with --smoke) every case runs once in a small size: that shows that the bench works, its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oneloop.device.cpus import usable_cpus
from oneloop_bench.report import run_bench, save_result
from oneloop_kernels.compiling.workers import CompileWorkers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop_bench.kernels.kernel_case import KernelCase
    from oneloop_bench.kernels.timing import Timing

GRAPH_S: Final = 5e-4
"""The launches of a graph take at least as long at the card's limit: starting it takes some µs."""
REPLAYS_S: Final = 0.05
MIN_REPLAYS: Final = 5
MAX_LAUNCHES, MIN_LAUNCHES = 128, 6


class Table:
    """One run: the cases, the card's rates, the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: of `read_options`."""
        from oneloop_bench.kernels.cases import all_cases
        from oneloop_bench.kernels.timing import bench_device

        self._began = time.perf_counter()
        self._budget_s: float = options.budget
        device = bench_device()
        self._smoke: bool = options.smoke or device.type == "cpu"
        self._device = device
        cases = all_cases(device, small=self._smoke)
        wanted = options.only.split("|")
        self._cases = [case for case in cases if any(text in f"{case.family} {case.name}" for text in wanted)]
        self.ceilings: dict[str, float] = {}
        """Bytes or FLOP per second."""
        self.seconds: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}

    def measure(self, workers: CompileWorkers | None) -> None:
        """Compile, measure the card, then every case."""
        if not self._smoke:
            self._timed("compile", lambda: self._compile(workers))
            if workers is not None:
                workers.close()
            self._timed("ceilings", self._measure_card)
        self._timed("measure", self._measure_cases)

    def result(self) -> dict[str, Any]:
        """For the page and for --json."""
        from oneloop_bench.kernels.timing import device_machine

        units = {"read": ("GB/s", 1e9), "copy": ("GB/s", 1e9), "bf16": ("TFLOP/s", 1e12)}
        units["fp8"] = units["bf16"]
        return {
            "bench": "kernels",
            "smoke": self._smoke,
            "ceilings": {
                name: {"rate": round(rate / units[name][1], 1), "unit": units[name][0]}
                for name, rate in self.ceilings.items()
            },
            "rows": self.rows,
            "failed": self.failed,
            "seconds": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
            "utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "machine": device_machine(),
        }

    def _timed(self, part: str, work: Any) -> None:
        begin = time.perf_counter()
        work()
        self.seconds[part] = time.perf_counter() - begin
        print(f"{part}: {self.seconds[part]:.1f} s", flush=True)

    def _compile(self, workers: CompileWorkers | None) -> None:
        """A launch of every way runs nothing here. One that fails says so again when it is measured."""
        from oneloop_bench.kernels import read_rate
        from oneloop_kernels.launch import compiling_ahead

        with compiling_ahead(usable_cpus(), workers):
            read_rate.compile_ways(self._device)
            for case in self._cases:
                inputs: Any = None
                for key, begin in case.ways.items():
                    try:
                        inputs = case.make() if inputs is None else inputs
                        begin()(inputs)
                    except Exception as error:  # whatever a compiler or a library says: the others go on
                        print(f"{case.family} {case.name} {key}: {error!r}"[:300], flush=True)

    def _measure_card(self) -> None:
        from oneloop_bench.kernels.read_rate import read_rate
        from oneloop_bench.kernels.timing import Ceilings, fp8_rate

        measured = Ceilings.measure()
        self.ceilings = {"read": read_rate(), "copy": measured.bandwidth, "bf16": measured.bf16}
        try:
            self.ceilings["fp8"] = fp8_rate()
        except RuntimeError as error:  # a card without such products
            self.failed["ceiling fp8"] = f"{error!r}"[:300]

    def _measure_cases(self) -> None:
        for case in self._cases:
            if time.perf_counter() - self._began > self._budget_s:
                self.failed[f"{case.family} {case.name}"] = "left out: the budget was used up"
                continue
            sets: list[Any] = []
            for way, begin in case.ways.items():
                try:
                    sets = sets or self._sets(case)
                    timing = self._time(case, begin(), sets)
                except Exception as error:  # as above
                    self.failed[f"{case.family} {case.name} {way}"] = f"{error!r}"[:300]
                    continue
                self.rows.append(row_of(case, way, timing, self.ceilings))
                print(_line(self.rows[-1]), flush=True)

    def _sets(self, case: KernelCase) -> list[Any]:
        from oneloop_bench.kernels.timing import num_sets

        return [case.make() for _ in range(1 if self._smoke else num_sets(case.num_bytes))]

    def _time(self, case: KernelCase, launch: Any, sets: Sequence[Any]) -> Timing:
        from oneloop_bench.kernels.timing import Effort, time_launches

        floor_s = max(floors(case, self.ceilings).values(), default=GRAPH_S)
        launches = min(MAX_LAUNCHES, max(MIN_LAUNCHES, math.ceil(GRAPH_S / floor_s)))
        effort = Effort(launches, REPLAYS_S, MIN_REPLAYS)
        return time_launches(launch, sets, smoke=self._smoke, effort=effort)


def floors(case: KernelCase, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Seconds that a launch takes at least, by ceiling; empty where the card was not measured."""
    needed = {case.memory: case.num_bytes, case.compute: case.num_flops}
    return {name: work / ceilings[name] for name, work in needed.items() if name in ceilings}


def row_of(case: KernelCase, way: str, timing: Timing, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """us, share of the ceiling that is nearer, which that is, what is to be reached and whether it is.

    Only the first way has a target: it is ours.
    """
    found = floors(case, ceilings)
    ceiling = max(found, key=lambda name: found[name], default=None)
    share = None if ceiling is None else found[ceiling] / (timing.us * 1e-6)
    target: dict[str, float] | None = None
    reached = None
    if way == next(iter(case.ways)) and share is not None:
        if case.share is not None:
            target, reached = {"share": case.share}, share >= case.share
        elif case.us is not None:
            target, reached = {"us": case.us}, timing.us <= case.us
    return {
        "family": case.family,
        "case": case.name,
        "way": way,
        "us": round(timing.us, 3),
        "spread": round(timing.spread, 4),
        "share": None if share is None else round(share, 4),
        "ceiling": ceiling,
        "gb_s": round(case.num_bytes / timing.us / 1e3, 1),
        "tflop_s": round(case.num_flops / timing.us / 1e6, 1),
        "target": target,
        "reached": reached,
    }


def _line(row: Mapping[str, Any]) -> str:
    share = "" if row["share"] is None else f"{row['share']:6.1%} of {row['ceiling']}"
    mark = {True: "reached", False: f"not reached: {row['target']}", None: ""}[row["reached"]]
    return f"{row['family']:18} {row['case']:34} {row['way']:12} {row['us']:9.2f} µs {share} {mark}"


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds, after which no case is begun")
    parser.add_argument(
        "--only", default="", help="only cases whose family and name contain this (a|b: or that)"
    )
    parser.add_argument("--smoke", action="store_true", help="run everything once, measure nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; the last line is the JSON object."""
    options = read_options(arguments)
    # They start before torch is imported here.
    workers = None if options.smoke else CompileWorkers.start(usable_cpus())
    try:
        table = Table(options)
        table.measure(workers)
    finally:
        if workers is not None:
            workers.close()
    result = table.result()
    if options.json is not None:
        save_result(options.json, result)
    print(json.dumps(result))


if __name__ == "__main__":
    run_bench(main)
