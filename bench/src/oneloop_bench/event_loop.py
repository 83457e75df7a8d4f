"""The event loop of a server with a real model under streaming load: µs per step by part, from /metrics.

    python -m oneloop_bench.event_loop MODEL_DIR [--streams 1,64,512] [--json FILE] [--serve-options "--device cpu"]

Dummy weights. Text prompts, streamed in a closed loop by the load test's client in this process; /metrics is read
before and after each load. Each load is preceded by half of it that does not count, in which its steps are captured.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import shlex
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from oneloop.engine.loop_times import PARTS
from oneloop_bench.h200 import measured
from oneloop_bench.host_load import loop_metrics
from oneloop_bench.load.closed_loop import closed_loop
from oneloop_bench.load.datasets import RandomLengths
from oneloop_bench.load.prompts import named_tokenizer, prompt_source
from oneloop_bench.report import print_result, run_bench, save_result
from oneloop_bench.server import running_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVE: Final = (
    *("--load-format", "dummy", "--dtype", "bfloat16"),
    *("--served-model-name", "m", "--max-model-len", "8192"),
)
REQUESTS_PER_STREAM: Final = 2


def per_step(before: Mapping[str, float], after: Mapping[str, float], wall_s: float) -> dict[str, Any]:
    """Two readings of `loop_metrics` → µs of the loop per step: by part, what is in none, and in all.

    busy: share of the wall time that the loop was at work. collector: part of the others' time. ValueError: no step.
    """

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    steps = grown("steps_total")
    if steps <= 0:
        raise ValueError("no step was made between the two readings")
    parts = {part: grown(f'part_seconds_total{{part="{part}"}}') / steps * 1e6 for part in PARTS}
    whole = grown("turn_seconds_sum") / steps * 1e6
    return {
        "steps": round(steps),
        "wall_us": round(wall_s / steps * 1e6, 1),
        "loop_us": round(whole, 1),
        "busy": round(whole * steps / wall_s * 1e-6, 4),
        "parts_us": {name: round(us, 2) for name, us in parts.items()},
        "other_us": round(whole - sum(parts.values()), 2),
        "collector_us": round(grown("gc_pause_seconds_sum") / steps * 1e6, 2),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per number of streams."""
    streams = [int(number) for number in options.streams.split(",")]
    source = prompt_source(named_tokenizer(options.tokenizer or options.model), as_ids=False)
    lengths = RandomLengths(options.prompt_tokens, options.output_tokens)
    num_sessions = sum(streams) * (1 + REQUESTS_PER_STREAM)
    fresh = iter(
        lengths.sessions(num_sessions, source, np.random.default_rng(0))
    )  # none is cached when it comes
    loads = []
    settings = (*SERVE, *shlex.split(options.serve_options))
    with running_server(*settings, model=options.model, quiet=not options.log) as server:
        server.wait_ready()
        for number in streams:
            closed_loop(server.port, "m", list(islice(fresh, number)), number)
            load = list(islice(fresh, REQUESTS_PER_STREAM * number))
            before, begin = loop_metrics(server.port), time.perf_counter()
            closed_loop(server.port, "m", load, number)
            wall_s = time.perf_counter() - begin
            found = per_step(before, loop_metrics(server.port), wall_s)
            num_tokens = REQUESTS_PER_STREAM * number * options.output_tokens
            loads.append({"streams": number, "tok_s": round(num_tokens / wall_s), **found})
            print(loads[-1], flush=True)
    return loads


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,64,512", help="requests at once, with commas")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--tokenizer", help="folder; default: the model's")
    parser.add_argument("--serve-options", default="", help="more options of `oneloop serve`, in one string")
    parser.add_argument("--log", action="store_true", help="show the server's output")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = read_options(arguments)
    result = {
        "bench": "event_loop", "model": Path(options.model).name, "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens, "loads": measure(options), **measured(),
    }  # fmt: skip
    if options.json is not None:
        save_result(options.json, result)
    print_result(result)


if __name__ == "__main__":
    run_bench(main)
