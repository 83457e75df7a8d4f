"""What the live view costs those who are served: the gaps between tokens while nobody looks, and while somebody does.

`python -m oneloop_bench.live_view [--streams N --step-ms F --seconds F …]` serves the null executor and streams from
it. A process of its own fetches /debug/scheduler once a second, as its page does, but only in every other window of a
few seconds: so what else the machine does falls on both kinds. Each pair of neighbouring windows gives a ratio of their
99th percentiles; the result is the pairs' median and, because machines are noisy, an interval that it lies in (95 %,
bootstrap over the pairs). An interval that reaches beyond the limit has not shown that the view keeps it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop_bench.load.closed_loop import closed_loop
from oneloop_bench.load.workload import Session, Turn
from oneloop_bench.report import print_figures
from oneloop_bench.server import running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RATIO = 1.02
"""Of the 99th percentile with somebody looking to that without."""
LEAD_IN_S = 3.0
"""Until every stream runs."""
NUM_RESAMPLES = 4000


def is_looked_at(now: float, begin: float, window_s: float) -> bool:
    """Whether `now` is in one of the windows in which somebody looks: every second one since `begin`."""
    return now >= begin and int((now - begin) / window_s) % 2 == 1


def poll(port: int, begin: float, window_s: float, poll_s: float) -> None:
    """Look every so often in the windows for it, until this process is ended."""
    while True:
        now = time.perf_counter()
        if is_looked_at(now, begin, window_s):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/debug/scheduler", timeout=30) as reply:
                reply.read()
            time.sleep(poll_s)
        else:
            time.sleep(0.02)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Percentiles of both kinds of windows in ms, and the ratio with its interval."""
    num_tokens = int((options.seconds + LEAD_IN_S) * 1e3 / options.step_ms)
    sessions = [Session([Turn("x" * 32, output_len=num_tokens)]) for _ in range(options.streams)]
    arguments = ["--executor", "null", "--null-step-ms", str(options.step_ms), "--enable-debug-endpoints"]
    arguments += ["--max-num-seqs", str(options.streams), "--max-model-len", str(num_tokens + 64)]
    arguments += ["--num-gpu-blocks-override", str(options.streams * (num_tokens // 16 + 8))]
    with running_server(*arguments, model="null") as server:
        server.wait_ready()
        begin = time.perf_counter() + LEAD_IN_S
        command = [sys.executable, "-m", "oneloop_bench.live_view", "--poll", str(server.port)]
        command += [
            "--begin",
            repr(begin),
            "--window-s",
            str(options.window_s),
            "--poll-s",
            str(options.poll_s),
        ]
        with subprocess.Popen(command) as poller:
            try:
                outcome = closed_loop(server.port, "null", sessions, options.streams)
            finally:
                poller.terminate()
    streams = [np.array(record.times) for record in outcome.records]
    times = np.concatenate([stream[1:] for stream in streams])
    gaps = np.concatenate([np.diff(stream) for stream in streams])
    return compare(times, gaps, begin, options.window_s)


def compare(
    times: np.ndarray[Any, Any], gaps: np.ndarray[Any, Any], begin: float, window_s: float
) -> dict[str, Any]:
    """Pairs of neighbouring whole windows, nobody looking in the first and somebody in the second."""
    windows = np.floor((times - begin) / window_s).astype(int)
    num_pairs = int(windows.max()) // 2
    by_window = [gaps[windows == window] for window in range(2 * num_pairs)]
    alone, looked_at = by_window[::2], by_window[1::2]
    ratios = np.array(
        [np.percentile(b, 99) / np.percentile(a, 99) for a, b in zip(alone, looked_at, strict=True)]
    )
    draws = np.random.default_rng(0).choice(ratios, (NUM_RESAMPLES, num_pairs))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "alone_ms": _percentiles(alone),
        "looked_at_ms": _percentiles(looked_at),
        "num_pairs": num_pairs,
        "itl_p99_ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
    }


def _percentiles(windows: Sequence[np.ndarray[Any, Any]]) -> dict[str, float]:
    gaps = np.concatenate(windows)
    return {f"p{share}": round(float(np.percentile(gaps, share)) * 1e3, 3) for share in (50, 90, 99, 100)}


def main() -> None:
    """Print the figures; exit code 1 where the whole interval is beyond the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument(
        "--poll-s", type=float, default=1.0, help="between two looks; less: what the view costs shows sooner"
    )
    parser.add_argument("--poll", type=int, metavar="PORT", help="be the one who looks")
    parser.add_argument("--begin", type=float, default=0.0, help="with --poll: when the first window begins")
    options = parser.parse_args()
    if options.poll is not None:
        poll(options.poll, options.begin, options.window_s, options.poll_s)
    result = measure(options)
    print_figures(result)
    sys.exit(result["interval"][0] > MAX_RATIO)


if __name__ == "__main__":
    main()
