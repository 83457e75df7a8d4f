"""`oneloop bench startup`: seconds until a server is ready, by part, with empty and with full kernel caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop_bench.commands.values import whole_number
from oneloop_bench.load.result import save
from oneloop_bench.report import print_result
from oneloop_bench.start import Start, kernel_caches, measure_start

if TYPE_CHECKING:
    import argparse

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See main."""
    parser.add_argument("--model", default="smollm2", help="default: the embedded %(default)s")
    parser.add_argument(
        "--num-iters-cold",
        type=whole_number,
        default=1,
        metavar="N",
        help="starts with empty kernel caches; default: %(default)s",
    )
    parser.add_argument(
        "--num-iters-warmup",
        type=whole_number,
        default=1,
        metavar="N",
        help="starts that fill the caches, not counted; default: %(default)s",
    )
    parser.add_argument(
        "--num-iters-warm",
        type=whole_number,
        default=3,
        metavar="N",
        help="starts with full caches; default: %(default)s",
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "serve_options", nargs="*", metavar="OPTION", help="options of `oneloop serve`, after --"
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. The last line is the result. Raises RuntimeError when a start fails."""
    given = options.serve_options
    cold = [_start(options.model, given, "cold", number) for number in range(options.num_iters_cold)]
    with kernel_caches() as environment:
        for number in range(options.num_iters_warmup):
            _start(options.model, given, "warm-up", number, environment)
        warm = [
            _start(options.model, given, "warm", number, environment)
            for number in range(options.num_iters_warm)
        ]
    result = {"model": options.model, **_figures("cold", cold), **_figures("warm", warm)}
    if options.output_json is not None:
        save(result, options.output_json)
    print_result(result)
    return 0


def _start(
    model: str, given: list[str], kind: str, number: int, environment: dict[str, str] | None = None
) -> Start:
    """One start; None: with empty caches of its own."""
    if environment is None:
        with kernel_caches() as fresh:
            start = measure_start(given, model=model, environment=fresh)
    else:
        start = measure_start(given, model=model, environment=environment)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.parts.items())
    print(
        f"{kind} {number + 1}: ready after {start.ready_s:.2f} s, first answer {start.first_answer_s:.2f} s ({parts})",
        flush=True,
    )
    return start


def _figures(kind: str, starts: list[Start]) -> dict[str, Any]:
    """Names as in `vllm bench startup`, and the parts' means."""
    if not starts:
        return {}
    times = [start.ready_s for start in starts]
    names = dict.fromkeys(name for start in starts for name in start.parts)
    return {
        f"avg_{kind}_startup_time": float(np.mean(times)),
        f"{kind}_startup_times": times,
        f"{kind}_startup_percentiles": {str(p): float(np.percentile(times, p)) for p in PERCENTILES},
        f"avg_{kind}_first_answer_time": float(np.mean([start.first_answer_s for start in starts])),
        f"avg_{kind}_parts": {
            name: float(np.mean([start.parts.get(name, 0.0) for start in starts])) for name in names
        },
    }
