"""The whole table of one H200, through the anchors' own drivers; the newest run is bench/results/h200.json.

On the device:  python -m oneloop_bench.h200 --only offline:qwen06b,start:llama8b --budget 540 --out $OUT/h200.json
Here:           python -m oneloop_bench.h200 --merge FILE…     adds the files to the results, makes the table anew

Parts: offline:MODEL, offline:MODEL:WORKLOAD, online:WORKLOAD, start:MODEL; names as in the anchors' workloads.py. With
--engine fp8 offline figures are those of weights in 8 bits, under "MODEL fp8".
The drivers are looked for in $ONELOOP_ANCHORS. What does not fit the budget is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop_bench.page import take
from oneloop_bench.report import BenchError, machine, run_bench
from oneloop_bench.start import kernel_caches, measure_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EVERYTHING = (
    "start:llama8b",
    "offline:qwen06b",
    "online:qwen06b_conc512",
    "offline:llama8b",
    "online:llama8b_rate16",
    "online:llama8b_conc256",
)
MAX_MODEL_LEN = 8192
MEMORY_PART = 0.9
LEAST_S = {"offline": 40.0, "online": 60.0, "start": 60.0}
"""A part is not begun with less time than this."""
STOP_S = 40.0
"""What a driver gets to end itself and its server."""
ENGINES = {"bf16": "OneloopEngine", "fp8": "OneloopFp8Engine"}
"""--engine → the class in anchors.py."""
SERVE = ("--load-format", "dummy", "--dtype", "bfloat16", "--served-model-name", "m")


class Run:
    """One call's parts: where the drivers are, how much time is left, what has been found."""

    def __init__(
        self, anchors: Path, out: Path, budget_s: float, options: Sequence[str], engine: str = "bf16"
    ) -> None:
        self._anchors = anchors
        self._out = out
        self._deadline = time.monotonic() + budget_s
        self._options = tuple(options)
        self._engine = engine
        self.results: dict[str, Any] = {"offline": {}, "online": {}, "start": {}, "failed": {}}

    def all(self, parts: Sequence[str]) -> None:
        """Run the parts; those of one kind and model share one engine or server. Saves after each."""
        measures: dict[str, Callable[[str, list[str]], None]] = {
            "offline": self._offline,
            "online": self._online,
            "start": self._start,
        }
        for kind, model, names in groups(parts):
            label = f"{kind}:{model}"
            if self._left_s() < LEAST_S[kind]:
                self._fail(label, f"left out: {self._left_s():.0f} s of the budget were left")
                continue
            begin = time.monotonic()
            try:
                measures[kind](model, names)
            except (OSError, RuntimeError, ValueError) as error:
                self._fail(label, repr(error))
            print(f"== {label} took {time.monotonic() - begin:.0f} s", flush=True)
            self._save()

    def _offline(self, model: str, names: list[str]) -> None:
        command = ["bench_offline.py", "--model", model, "--model-dir", str(self._model(model))]
        command += [
            "--engine",
            f"oneloop_bench.anchors:{ENGINES[self._engine]}",
            "--max-model-len",
            str(MAX_MODEL_LEN),
        ]
        command += ["--mem", str(MEMORY_PART), "--only", ",".join(names)]
        found = self._drive(command)
        results = self.results["offline"].setdefault(
            model if self._engine == "bf16" else f"{model} {self._engine}", {}
        )
        for name, figures in found["results"].items():
            if isinstance(figures, str):
                self._fail(f"offline:{model}:{name}", figures)
            else:
                results[name] = figures
        about = {key: found[key] for key in ("start_s", "start_incl_import_s", "first_generate_s", "info")}
        results["engine"] = {**about, "measured": measured()}

    def _online(self, model: str, names: list[str]) -> None:
        folder = str(self._model(model))
        log = self._out.with_name(f"server_{model}.log")
        command = ["serve_session.py", "--tokenizer-dir", folder, "--workloads", ",".join(names)]
        command += ["--log", str(log), "--start-timeout", "150", "--port", "8123"]
        server = [sys.executable, "-m", "oneloop.cli.main", "serve", folder, *SERVE]
        server += ["--max-model-len", str(MAX_MODEL_LEN), "--port", "8123", *self._options]
        found = self._drive(command, after=["--", *server])
        for name, figures in found["own"].items():
            entry = {**figures, "health_after_s": found["health_after_s"], "measured": measured()}
            self.results["online"][name] = entry
        for name in set(names) - set(found["own"]):
            self._fail(f"online:{name}", "no result; see the server's log")

    def _start(self, model: str, _: list[str]) -> None:
        """Seconds until /health answers: first with empty caches of compiled kernels, then with what that left."""
        entry: dict[str, Any] = {"measured": measured()}
        options = (*SERVE, "--max-model-len", str(MAX_MODEL_LEN), *self._options)
        with kernel_caches() as environment:
            for temperature in ("cold", "warm"):
                start = measure_start(options, model=str(self._model(model)), environment=environment)
                entry[f"{temperature}_s"] = start.ready_s
                entry[f"{temperature}_first_answer_s"] = start.first_answer_s - start.ready_s
                entry[f"{temperature}_parts_s"] = start.parts
                print("BENCH", json.dumps(entry), flush=True)
        self.results["start"][model] = entry

    def _drive(self, command: list[str], after: Sequence[str] = ()) -> dict[str, Any]:
        """Run one of the drivers and read what it wrote, also when it was cut short."""
        with tempfile.TemporaryDirectory(prefix="oneloop-drive-") as folder:
            out = Path(folder, "out.json")
            left = self._left_s()
            full = [sys.executable, str(self._anchors / command[0]), *command[1:], "--out", str(out)]
            full += ["--deadline", f"{max(left - STOP_S, 1):.0f}"]
            print("==", shlex.join([*full, *after]), flush=True)
            process = subprocess.Popen([*full, *after], start_new_session=True)
            try:
                process.wait(timeout=max(left, 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(timeout=STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not out.exists():
                raise RuntimeError(f"{command[0]} ended with status {process.returncode} and no result")
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found

    def _model(self, model: str) -> Path:
        return self._anchors / "models" / model

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _fail(self, label: str, why: str) -> None:
        print(f"== {label} FAILED: {why}", flush=True)
        self.results["failed"][label] = why
        self._save()

    def _save(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def groups(parts: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(kind, model, workloads) in the order given; neighbours of one kind and model are one group.

    No workloads: all of the model's. ValueError for a part of another form.
    """
    pending: tuple[str, str, list[str]] | None = None
    for part in parts:
        kind, _, rest = part.partition(":")
        if kind not in LEAST_S or not rest:
            raise ValueError(f"{part}: a part is offline:MODEL[:WORKLOAD], online:WORKLOAD or start:MODEL")
        model, _, name = rest.partition(":")
        if kind == "online":
            model, name = rest.split("_", 1)[0], rest
        if pending is not None and pending[:2] == (kind, model) and name and pending[2]:
            pending[2].append(name)
            continue
        if pending is not None:
            yield pending
        pending = (kind, model, [name] if name else [])
    if pending is not None:
        yield pending


def measured() -> dict[str, Any]:
    """When and on what."""
    found = {"utc": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), **machine()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["gpu"] = None
    return found


def main() -> None:
    """Measure, or merge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(EVERYTHING), help="parts, with commas")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("h200.json"))
    parser.add_argument("--serve-options", default="", help="more options of `oneloop serve`, in one string")
    parser.add_argument("--engine", choices=ENGINES, default="bf16", help="of the offline parts")
    parser.add_argument("--merge", type=Path, nargs="+", help="as `python -m oneloop_bench.page`")
    options = parser.parse_args()
    if options.merge:
        take(options.merge)
        return
    anchors = Path(os.environ.get("ONELOOP_ANCHORS", ""))
    if not (anchors / "bench_offline.py").is_file():
        raise BenchError(
            "ONELOOP_ANCHORS must name the folder of the measuring drivers (bench_offline.py, models/), which is "
            "no part of this repository; bench/README.md says more"
        )
    run = Run(anchors, options.out, options.budget, shlex.split(options.serve_options), options.engine)
    run.all(options.only.split(","))
    print(json.dumps(run.results))


if __name__ == "__main__":
    run_bench(main)
