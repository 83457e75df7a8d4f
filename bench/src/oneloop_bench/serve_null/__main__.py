"""Token events per second over HTTP, and their pace, with steps that cost nothing: what the host path can do.

`make bench-serve-null`. The server (`oneloop serve --executor null`) has one CPU, a counting client another. At 0 ms a
step, 256 and 1,024 streams; beside it what a process reaches that does nothing but write the same events. Then at 5 ms
a step the times between events of 256 streams, and for 1,024 streams the step time from which each event comes alone
and in time; there both sides go before the machine's other processes, where that is allowed. A token event is a `data:`
event with one token; several come in one write only when client or loop is behind.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

import numpy as np

from oneloop.cli.serve import allow_many_descriptors
from oneloop_bench.report import BenchError, print_result, run_bench
from oneloop_bench.serve_null.client import count_streams, make_requests
from oneloop_bench.serve_null.machine import Cpus, Shares, choose_cpus, null_server, on_cpu, undisturbed

TOKENS_PER_STREAM = 512
ROUNDS = 2
"""Requests per stream."""
PACED_STEP_MS = 5.0
PACED_TOKENS = 600
LEAD_IN = 150
"""Events of each stream until all streams run."""
LADDER_MS = (4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0)
IN_TIME = 0.97
"""Of the events that a step time promises."""
ALONE = 0.99
"""Of the events that are read one by one."""
NUM_DESCRIPTORS = 2_200
"""Of the server: two per stream."""
GOALS = {"tok_s_256": 100_000, "tok_s_1024": 100_000, "itl_p99_over_step_256": 1.5}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(float(statistics.median(run[name] for run in runs)), 3) for name in runs[0]}


def measure_throughput(cpus: Cpus, num_streams: int, repeats: int) -> dict[str, Any]:
    """Token events per second with steps that take no time: the median of the repeats, and all of them."""
    requests = make_requests(ROUNDS * num_streams, TOKENS_PER_STREAM)
    runs = []
    with null_server(cpus, num_streams, TOKENS_PER_STREAM, 0.0) as server:
        count_streams(server.port, requests[:64], 32, TOKENS_PER_STREAM)
        for _ in range(repeats):
            shares = Shares(server.process.pid)
            counts = count_streams(server.port, requests, num_streams, TOKENS_PER_STREAM)
            run = {
                "tok_s": round(counts.num_events / counts.wall_s),
                "tokens_per_event": round(counts.num_tokens / counts.num_events, 3),
                "events_per_read": round(counts.num_events / counts.num_reads, 2),
                **shares.us_per_event(counts),
            }
            runs.append(run)
    return {
        **_medians(runs),
        "runs_tok_s": [run["tok_s"] for run in runs],
        "writes_s": max(measure_ceiling(cpus, num_streams) for _ in range(repeats)),
    }


def measure_ceiling(cpus: Cpus, num_streams: int) -> int:
    """Events per second of a process that only writes them, one by one."""
    command = [
        sys.executable,
        "-m",
        "oneloop_bench.serve_null.ceiling",
        str(num_streams),
        str(TOKENS_PER_STREAM),
    ]
    with on_cpu(cpus.server), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with on_cpu(cpus.client):
            requests = make_requests(num_streams, TOKENS_PER_STREAM)
            counts = count_streams(port, requests, num_streams, TOKENS_PER_STREAM)
    return round(counts.num_events / counts.wall_s)


def measure_pace(cpus: Cpus, num_streams: int, step_ms: float, repeats: int) -> dict[str, Any]:
    """Times between events at a fixed step time; medians of the repeats."""
    requests = make_requests(num_streams, PACED_TOKENS)
    runs = []
    with null_server(cpus, num_streams, PACED_TOKENS, step_ms) as server:
        count_streams(server.port, requests[:8], 8, PACED_TOKENS)
        for _ in range(repeats):
            shares = Shares(server.process.pid)
            counts = count_streams(server.port, requests, num_streams, PACED_TOKENS, lead_in=LEAD_IN)
            gaps = np.array(counts.gaps)
            p50, p99, p999 = (float(share) for share in np.percentile(gaps, [50, 99, 99.9]) * 1e3)
            run = {
                "itl_p50_ms": p50,
                "itl_p99_ms": p99,
                "itl_p999_ms": p999,
                "itl_p99_over_step": p99 / step_ms,
                "pace": step_ms / (float(gaps.mean()) * 1e3),
                "alone": float((gaps > 0).mean()),
                "tokens_per_event": counts.num_tokens / counts.num_events,
                **shares.us_per_event(counts),
            }
            runs.append(run)
    return _medians(runs)


def find_step_time(cpus: Cpus, num_streams: int) -> dict[str, Any]:
    """The shortest step time of the ladder at which each event comes alone and in time; None: none of them."""
    for step_ms in LADDER_MS:
        pace = measure_pace(cpus, num_streams, step_ms, 1)
        print(f"{num_streams} streams, {step_ms:g} ms: {pace}", flush=True)
        if pace["pace"] >= IN_TIME and pace["alone"] >= ALONE and pace["tokens_per_event"] < 2 - ALONE:
            return {"step_ms": step_ms, **pace}
    return {"step_ms": None}


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m oneloop_bench.serve_null",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    limit = allow_many_descriptors()
    if limit < NUM_DESCRIPTORS:
        raise BenchError(
            f"1,024 streams take {NUM_DESCRIPTORS} descriptors, and {limit} are allowed: raise `ulimit -Hn`"
        )
    cpus, result = choose_cpus(), dict[str, Any]()
    for num_streams in (256, 1024):
        found = measure_throughput(cpus, num_streams, options.repeats)
        result[f"streams_{num_streams}"] = found
        result[f"tok_s_{num_streams}"] = round(found["tok_s"])
        print(f"{num_streams} streams, 0 ms: {found}", flush=True)
    with undisturbed() as is_undisturbed:
        pace = measure_pace(cpus, 256, PACED_STEP_MS, options.repeats)
        print(f"256 streams, {PACED_STEP_MS:g} ms: {pace}", flush=True)
        result["pace_256"] = pace
        result["itl_p99_over_step_256"] = pace["itl_p99_over_step"]
        result["keeps_up_1024"] = find_step_time(cpus, 1024)
    result["keeps_up_step_ms_1024"] = result["keeps_up_1024"]["step_ms"]
    result["undisturbed"] = is_undisturbed
    print_result({**result, "cpus": cpus._asdict(), "goals": GOALS})


if __name__ == "__main__":
    run_bench(main)
