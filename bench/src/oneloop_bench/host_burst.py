"""What the event loop spends on taking a request in: bursts of short streamed requests over steps that cost nothing.

`python -m oneloop_bench.host_burst [as host_load]`. CPU time of the loop's thread per request, on connections that are
made for it and on ones that are there already, and of the tokenising threads. With one token per reply that is the
request's way in and the first of its way out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop_bench.host_load import Requests, null_server, percentiles, read_options
from oneloop_bench.load.closed_loop import closed_loop
from oneloop_bench.load.metrics import Latencies
from oneloop_bench.report import print_figures

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SETTLE_S = 0.3
"""After a burst: connections are closed, threads come to rest."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """µs of CPU time per request; the client's times in ms. Twice as many as `requests` are sent, `streams` at once."""
    requests = Requests(options)
    sessions, others = requests.draw(options.requests), requests.draw(options.requests)
    bursts = [sessions[first : first + options.streams] for first in range(0, len(sessions), options.streams)]
    with null_server(options) as server:
        requests.warm_up(server.port)
        time.sleep(SETTLE_S)
        before, records = _thread_seconds(server.pid), []
        for burst in bursts:
            records += closed_loop(server.port, "null", burst, options.streams).records
        time.sleep(SETTLE_S)
        between = _thread_seconds(server.pid)
        kept = closed_loop(server.port, "null", others, options.streams).records
        time.sleep(SETTLE_S)
        after = _thread_seconds(server.pid)
    return {
        "new_connections": _per_request(server.pid, before, between, len(sessions)),
        "kept_connections": _per_request(server.pid, between, after, len(others)),
        "ttft_ms": percentiles(Latencies.of(records).ttft),
        "kept_ttft_ms": percentiles(Latencies.of(kept).ttft),
    }


def _per_request(
    pid: int, before: dict[int, float], after: dict[int, float], num_requests: int
) -> dict[str, float]:
    """pid: of the process, and of its first thread, which runs the loop."""
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    loop = spent.pop(pid)
    return {
        "loop_us": round(loop / num_requests * 1e6, 1),
        "other_threads_us": round(sum(spent.values()) / num_requests * 1e6, 1),
    }


def _thread_seconds(pid: int) -> dict[int, float]:
    """CPU time of every thread, to the nanosecond: the kernel's scheduler counts it."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) * 1e-9
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures. arguments: None: the command line's."""
    options = read_options(arguments)
    print_figures(measure(options))


if __name__ == "__main__":
    main()
