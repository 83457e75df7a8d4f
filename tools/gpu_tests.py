"""All GPU tests, several pytest processes at once: most of their time goes into compiling kernels, on one core each.

    python tools/gpu_tests.py [--out FOLDER] [--workers N] [--budget SECONDS] [--only NAMES] [-- pytest arguments]

Every part writes its log and its JUnit XML to the folder (default: gpu-tests in a temporary one). Parts that take long
begin first. Tests that compile the same kernels stand in one part, one after another: a whole engine has some hundred
kernels, and parts that begin at once would each compile them, on all CPUs. What measures time or how long the event
loop is held runs alone at the end. On standard output: a line per part, then
every failed test with its reason. The status is 0 when all parts passed. Shortly before the budget is spent, parts that
run are interrupted and say what they have; those that have not begun count as failed. What follows `--` goes to every
pytest, for example
`-- -k 'not smollm2'`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from oneloop.device.cpus import usable_cpus

ROOT: Final = Path(__file__).parents[1]
TESTS_FAILED: Final = 1
NOTHING_COLLECTED: Final = 5
INTERRUPT_S: Final = 12.0
"""How long an interrupted pytest may take to tell what it has; at the end of the budget."""
REASON_CHARACTERS: Final = 400
MAX_WORKERS: Final = 16
"""By default: each takes a context's memory of the card, and a few GB of the host's."""
THREAD_COUNTS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""What torch and numpy ask how many threads to compute with on the CPU; by themselves as many as there are CPUs."""


@dataclass(frozen=True)
class Part:
    """Tests that one process runs: a share of what pytest collects from `paths`, files or tests of files.

    without: tests of these files that another part runs. seconds: about what a share takes with nothing compiled before
    and a part on every other CPU (16 cores, an H200). alone: no other part runs beside it.
    """

    name: str
    paths: tuple[str, ...]
    seconds: float = 0.0
    share: int = 1
    shares: int = 1
    without: tuple[str, ...] = ()
    alone: bool = False

    @property
    def label(self) -> str:
        return self.name if self.shares == 1 else f"{self.name}_{self.share}"


def parts_of(
    name: str, *paths: str, seconds: float = 0.0, shares: int = 1, without: tuple[str, ...] = ()
) -> list[Part]:
    """The same paths in so many processes."""
    return [Part(name, paths, seconds, share, shares, without) for share in range(1, shares + 1)]


def alone(name: str, *paths: str) -> Part:
    """One process, with the card to itself."""
    return Part(name, paths, alone=True)


_MIXED: Final = "tests/gpu/test_mixed_run.py"
_MIXED_IN_FLOAT32: Final = f"{_MIXED}::test_tiny_on_the_gpu"
_TIMED_LOAD: Final = "tests/loader/test_gpu_load.py::test_dummy_weights_are_fast_and_the_same_every_time"
TOGETHER: Final = [
    # Whole engines. The parity tests in halves of those in bfloat16 and those in float32.
    *parts_of("smollm2_parity", "tests/gpu/test_smollm2_parity.py", seconds=110, shares=4),
    *parts_of("mixed_run", _MIXED_IN_FLOAT32, seconds=120),
    *parts_of("mixed_run_short_types", _MIXED, without=(_MIXED_IN_FLOAT32,), seconds=80, shares=2),
    *parts_of("deterministic", "tests/gpu/test_deterministic.py", seconds=90, shares=4),
    *parts_of("fp8_quality", "tests/e2e/test_fp8_quality.py", seconds=90),
    *parts_of("out_of_memory", "tests/gpu/test_out_of_memory.py", seconds=30),
    # Kernels.
    *parts_of(
        "attention", "tests/kernels/test_paged_attention_triton.py", "tests/kernels/test_paged_attention_ahead.py",
        seconds=100, shares=8,
    ),
    *parts_of(
        "linear", "tests/kernels/test_linear.py", "tests/kernels/test_linear_on_hopper.py",
        "tests/kernels/test_heads.py", seconds=60, shares=4,
    ),
    *parts_of(
        "fp8_linear", "tests/kernels/test_fp8_linear.py", "tests/kernels/test_fp8_linear_on_hopper.py",
        "tests/kernels/test_short_sums.py", "tests/kernels/test_fp8_by_cublas.py", seconds=70, shares=3,
    ),
    *parts_of(
        "sampling", "tests/kernels/test_sampling_device.py", "tests/kernels/test_sampling.py",
        "tests/kernels/test_scores.py", seconds=105, shares=2,
    ),
    *parts_of(
        "packed_linear", "tests/kernels/test_packed_linear.py", "tests/kernels/test_packed_linear_on_hopper.py",
        seconds=95,
    ),
    *parts_of("chain", "tests/gpu/test_layer_chain.py", seconds=50, shares=3),
    *parts_of("worker", "tests/worker", seconds=50, shares=2),
    *parts_of("moe", "tests/kernels/test_moe.py", seconds=42, shares=4),
    *parts_of("moe_packed", "tests/kernels/test_moe_packed.py", seconds=40, shares=2),
    *parts_of("moe_fp8", "tests/kernels/test_moe_fp8.py", seconds=40, shares=3),
    *parts_of(
        "small_kernels", "tests/kernels/test_embedding.py", "tests/kernels/test_kv_cache.py",
        "tests/kernels/test_kv_fp8.py",
        "tests/kernels/test_layers.py", "tests/kernels/test_rms_norm.py", "tests/kernels/test_silu_mul.py",
        "tests/kernels/test_step_inputs.py", seconds=42, shares=2,
    ),
    *parts_of(
        "fixed_order", "tests/kernels/test_fixed_order.py", "tests/kernels/test_fixed_order_of_kinds.py",
        seconds=45, shares=4,
    ),
    *parts_of("models", "tests/models", seconds=40, shares=2),
    *parts_of("rope", "tests/kernels/test_rope.py", seconds=40),
    *parts_of("loader", "tests/loader", without=(_TIMED_LOAD,), seconds=30),
]  # fmt: skip
ALONE: Final = [
    alone("event_loop", "tests/gpu/test_no_waiting.py", "tests/gpu/test_idle_captures.py"),
    alone("card", "tests/device", _TIMED_LOAD),
]


@dataclass(frozen=True)
class Outcome:
    """What became of a part. problems: (test, reason) of each failure."""

    part: Part
    passed: int
    skipped: int
    problems: list[tuple[str, str]]
    seconds: float

    @property
    def line(self) -> str:
        verdict = "ok" if not self.problems else f"{len(self.problems)} FAILED"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.part.label:20} {verdict:10} {self.passed:4} passed{skipped}, {self.seconds:.0f} s"


class Run:
    """All parts of one run, with one folder and one deadline."""

    def __init__(self, folder: Path, deadline: float, arguments: Sequence[str]) -> None:
        """deadline: by time.monotonic(); then all is over."""
        self._folder = folder
        self._deadline = deadline
        self._arguments = arguments

    def part(self, part: Part, threads: int = 1) -> Outcome:
        """Run it, with so many threads for what it computes on the CPU. Waits."""
        begin = time.monotonic()
        if begin >= self._deadline - INTERRUPT_S:
            return Outcome(part, 0, 0, [(part.label, "not begun: the budget was spent")], 0.0)
        report = self._folder / f"{part.label}.xml"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            status = self._status_of(part, report, threads, Path(temporary))
        outcome = read_report(part, report, time.monotonic() - begin)
        if status is None:
            outcome.problems.append((part.label, "interrupted: the budget was spent"))
        elif status == NOTHING_COLLECTED:
            if not self._arguments:  # which may have left none
                outcome.problems.append((part.label, "no tests: is there a GPU?"))
        elif status and not (status == TESTS_FAILED and outcome.problems):
            outcome.problems.append((part.label, f"pytest ended with status {status}, see its log"))
        return outcome

    def _status_of(self, part: Part, report: Path, threads: int, temporary: Path) -> int | None:
        """What pytest ends with; None where it was interrupted.

        temporary: for its temporary files. Pytests that share their folder fail where one ends while another begins.
        """
        command = [
            sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", "--durations=8",
            "--durations-min=1", f"--junitxml={report}", f"--basetemp={temporary / 'tests'}",
            f"--share={part.share}/{part.shares}", *(() if part.alone else ("--shared-card",)),
            *(f"--deselect={test}" for test in part.without), *part.paths, *self._arguments,
        ]  # fmt: skip
        with (self._folder / f"{part.label}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | dict.fromkeys(THREAD_COUNTS, str(threads)),
            )  # fmt: skip
            return self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Its status; None where it was interrupted because the budget is spent."""
        try:
            return process.wait(max(0.0, self._deadline - INTERRUPT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(INTERRUPT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def read_report(part: Part, report: Path, seconds: float) -> Outcome:
    """Counts and failures of a JUnit file; none where pytest wrote none, or was killed while it did."""
    passed = skipped = 0
    problems = []
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        cases = []
    for case in cases:
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            name = f"{case.get('classname')}::{case.get('name')}"
            problems.append((name, " ".join((bad[0].get("message") or "").split())[:REASON_CHARACTERS]))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(part, passed, skipped, problems, seconds)


def run_all(run: Run, parts: Sequence[Part], workers: int) -> list[Outcome]:
    """Print each part's line as it ends. The longest begin first; those that run side by side share the CPUs."""
    outcomes = []
    threads = max(1, usable_cpus() // workers)

    def one(part: Part) -> None:
        outcome = run.part(part, threads)
        print(outcome.line, flush=True)
        outcomes.append(outcome)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, sorted(parts, key=lambda part: -part.seconds)))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for logs and reports")
    parser.add_argument("--workers", type=int, default=min(MAX_WORKERS, usable_cpus()))
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--only", default="", help="names of parts, separated by commas")
    parser.add_argument("pytest", nargs="*", help="arguments for every pytest")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp()) / "gpu-tests"
    folder.mkdir(parents=True, exist_ok=True)
    names = {name for name in options.only.split(",") if name}
    unknown = names - {part.name for part in (*TOGETHER, *ALONE)}
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    begin = time.monotonic()
    run = Run(folder, begin + options.budget, options.pytest)
    chosen = [[part for part in parts if not names or part.name in names] for parts in (TOGETHER, ALONE)]
    outcomes = run_all(run, chosen[0], options.workers) + run_all(run, chosen[1], 1)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    for name, reason in problems:
        print(f"FAILED {name}\n       {reason}")
    passed = sum(outcome.passed for outcome in outcomes)
    print(f"{passed} passed, {len(problems)} failed in {time.monotonic() - begin:.0f} s; logs in {folder}")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
