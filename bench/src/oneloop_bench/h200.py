"""The whole table of one H200, through the anchors' own drivers; the newest run is bench/results/h200.json.

On the device:  python -m oneloop_bench.h200 --only offline:qwen06b,start:llama8b --budget 540 --out $OUT/h200.json
Here:           python -m oneloop_bench.h200 --merge FILE…     adds the files to the results, makes the table anew

Parts: offline:MODEL, offline:MODEL:WORKLOAD, online:WORKLOAD, start:MODEL, determinism:MODEL (what the mode costs),
agreement:MODEL (how far the default's answers agree between batch sizes); names as in the anchors' workloads.py. An
offline MODEL may be MODEL+VARIANT: +fp8 (weights, keys and values), +fp8block, +w4a16 (as a GPTQ checkpoint), +steps8k
(steps of up to 8,192 tokens); its decode steps are of the batch sizes that the variant is judged by, or --batch.
The drivers are looked for in $ONELOOP_ANCHORS. What does not fit the budget is left out, and said. Every entry says
when, on what and by which command it was measured.
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
from oneloop_bench.variants import SETTINGS_VARIABLE, VARIANTS, model_folder, split_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
LEAST_S = {"offline": 25.0, "online": 60.0, "start": 60.0, "determinism": 25.0, "agreement": 40.0}
"""A part is not begun with less time than this."""
STOP_S = 40.0
"""What a driver gets to end itself and its server, where it is interrupted."""
LAST_BEGIN_S = 10.0
"""An offline driver begins no workload with less time than this."""
DETERMINISM = {
    "determinism": ("--batch", "1,32,256", "--context", "1024", "--steps", "30", "--prefill"),
    "agreement": ("--agreement", "48", "--batch", "8,48", "--tokens", "32", "--context", "512"),
}
"""Options of oneloop_bench.determinism."""
ENGINE = "oneloop_bench.anchors:OneloopEngine"
SERVE = ("--load-format", "dummy", "--dtype", "bfloat16", "--served-model-name", "m")


class Run:
    """One call's parts: where the drivers are, how much time is left, what has been found."""

    def __init__(self, anchors: Path, options: argparse.Namespace) -> None:
        """options: of `read_options`."""
        self._anchors = anchors
        self._options = options
        self._out: Path = options.out
        self._serve_options = tuple(shlex.split(options.serve_options))
        self._deadline: float = time.monotonic() + options.budget
        self.results: dict[str, Any] = {kind: {} for kind in (*LEAST_S, "failed")}

    def all(self, parts: Sequence[str]) -> None:
        """Run the parts; those of one kind and model share one engine or server. Saves after each."""
        measures: dict[str, Callable[[str, list[str]], None]] = {
            "offline": self._offline,
            "online": self._online,
            "start": self._start,
            "determinism": self._determinism,
            "agreement": self._agreement,
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

    def _offline(self, label: str, names: list[str]) -> None:
        """Workloads of a model, or of a variant of it, by one engine."""
        model, variant = split_label(label)
        batches = self._options.batch or ",".join(map(str, variant.batches))
        settings = dict(variant.settings) | json.loads(self._options.settings)
        command = ["-m", "oneloop_bench.offline_driver", str(self._anchors)]
        command += ["--batch", batches, "--"] if batches else ["--"]
        command += ["--model", model, "--only", ",".join(names), "--engine", ENGINE]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--mem", str(MEMORY_PART)]
        command += ["--deadline", f"{max(self._left_s() - LAST_BEGIN_S, 1):.0f}", "--model-dir"]
        with model_folder(self._model(model), variant) as folder:
            found = self._drive([*command, str(folder)], {SETTINGS_VARIABLE: json.dumps(settings)})
        results = self.results["offline"].setdefault(label, {"measured": {}})
        for name in dict.fromkeys((*names, *found["results"])):
            figures = found["results"].get(name, "cut short, or there is no such workload")
            if isinstance(figures, str):
                self._fail(f"offline:{label}:{name}", figures)
                continue
            results[name] = figures
            results["measured"][name] = self._measured(f"offline:{label}:{name}")
        about = {
            key: found.get(key) for key in ("start_s", "start_incl_import_s", "first_generate_s", "info")
        }
        results["engine"] = {**about, "settings": settings, "measured": self._measured(f"offline:{label}")}

    def _determinism(self, model: str, _: list[str]) -> None:
        self._modes("determinism", model)

    def _agreement(self, model: str, _: list[str]) -> None:
        self._modes("agreement", model)

    def _modes(self, kind: str, model: str) -> None:
        """Both modes in one engine."""
        command = ["-m", "oneloop_bench.determinism", str(self._model(model)), *DETERMINISM[kind]]
        command += ["--settings", self._options.settings]
        found = self._drive(command, out_option="--json")
        self.results[kind][model] = {**found, "measured": self._measured(f"{kind}:{model}")}

    def _online(self, model: str, names: list[str]) -> None:
        folder = str(self._model(model))
        log = self._out.with_name(f"server_{model}.log")
        command = [str(self._anchors / "serve_session.py"), "--tokenizer-dir", folder]
        command += ["--workloads", ",".join(names), "--deadline", f"{max(self._left_s() - STOP_S, 1):.0f}"]
        command += ["--log", str(log), "--start-timeout", "150", "--port", "8123"]
        server = [sys.executable, "-m", "oneloop.cli.main", "serve", folder, *SERVE]
        server += ["--max-model-len", str(MAX_MODEL_LEN), "--port", "8123", *self._serve_options]
        found = self._drive(command, after=["--", *server])
        for name, figures in found["own"].items():
            entry = {**figures, "health_after_s": found["health_after_s"]}
            self.results["online"][name] = entry | {"measured": self._measured(f"online:{name}")}
        for name in set(names) - set(found["own"]):
            self._fail(f"online:{name}", "no result; see the server's log")

    def _start(self, model: str, _: list[str]) -> None:
        """Seconds until /health answers: first with empty caches of compiled kernels, then with what that left."""
        entry: dict[str, Any] = {"measured": self._measured(f"start:{model}")}
        options = (*SERVE, "--max-model-len", str(MAX_MODEL_LEN), *self._serve_options)
        with kernel_caches() as environment:
            for temperature in ("cold", "warm"):
                start = measure_start(options, model=str(self._model(model)), environment=environment)
                entry[f"{temperature}_s"] = start.ready_s
                entry[f"{temperature}_first_answer_s"] = start.first_answer_s - start.ready_s
                entry[f"{temperature}_parts_s"] = start.parts
                print("BENCH", json.dumps(entry), flush=True)
        self.results["start"][model] = entry

    def _drive(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        out_option: str = "--out",
        after: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Run a Python program and read the JSON file that `out_option` names, also when it was cut short."""
        with tempfile.TemporaryDirectory(prefix="oneloop-drive-") as folder:
            out = Path(folder, "out.json")
            full = [sys.executable, *command, out_option, str(out), *after]
            print("==", shlex.join(full), flush=True)
            process = subprocess.Popen(full, start_new_session=True, env=os.environ | dict(environment or {}))
            try:
                process.wait(timeout=max(self._left_s(), 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(timeout=STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if not out.exists():
                raise RuntimeError(
                    f"{shlex.join(command[:2])} … ended with status {process.returncode} and no result"
                )
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found

    def _measured(self, part: str) -> dict[str, Any]:
        """When, on what and how."""
        return {**measured(), "command": command_of(part, self._options)}

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
            offline = "offline:MODEL[+VARIANT][:WORKLOAD]"
            others = "online:WORKLOAD, start:MODEL, determinism:MODEL, agreement:MODEL"
            raise ValueError(f"{part}: a part is one of {offline}, {others}")
        model, _, name = rest.partition(":")
        if kind == "offline":
            split_label(model)  # refuses a variant that is not there before anything is measured
        elif "+" in model:
            raise ValueError(f"{part}: only offline parts have variants ({', '.join(VARIANTS)})")
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


def command_of(part: str, options: argparse.Namespace) -> str:
    """What measures the part alone."""
    command = ["python", "-m", "oneloop_bench.h200", "--only", part]
    for name, value in (
        ("--batch", options.batch), ("--settings", options.settings), ("--serve-options", options.serve_options)
    ):  # fmt: skip
        if value not in ("", "{}"):
            command += [name, value]
    return shlex.join(command)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(EVERYTHING), help="parts, with commas")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("h200.json"))
    parser.add_argument("--batch", default="", help="of offline decode steps, with commas")
    parser.add_argument(
        "--settings", default="{}", help="more of the engine's, as JSON; not of online and start"
    )
    parser.add_argument("--serve-options", default="", help="more options of `oneloop serve`, in one string")
    parser.add_argument("--merge", type=Path, nargs="+", help="as `python -m oneloop_bench.page`")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or merge."""
    options = read_options(arguments)
    if options.merge:
        take(options.merge)
        return
    anchors = Path(os.environ.get("ONELOOP_ANCHORS", ""))
    if not (anchors / "bench_offline.py").is_file():
        raise BenchError(
            "ONELOOP_ANCHORS must name the folder of the measuring drivers (bench_offline.py, models/), which is "
            "no part of this repository; bench/README.md says more"
        )
    run = Run(anchors, options)
    run.all(options.only.split(","))
    print(json.dumps(run.results))


if __name__ == "__main__":
    run_bench(main)
