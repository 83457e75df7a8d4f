"""The host under the load of a fast device: many prompts at once, streamed, in a closed loop.

`python -m oneloop_bench.host_load [--streams N --requests N --step-ms F --token-ids …]` starts a server over a null
executor whose steps take a device's time, drives it with the load test's client, and prints the server's CPU time,
latencies and its event loop's seconds by part. Latencies mean something where the machine has cores for both; CPU time
always does.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from oneloop.engine.event_loop import turn_loop
from oneloop.engine.interpreter import settle_interpreter
from oneloop.engine.loop_times import LoopTimes
from oneloop.executor.null import Pace
from oneloop_bench.load.closed_loop import closed_loop
from oneloop_bench.load.datasets import RandomLengths
from oneloop_bench.load.metrics import Latencies
from oneloop_bench.load.prompts import named_tokenizer, prompt_source
from oneloop_bench.micro.core import TEXT
from oneloop_bench.report import print_figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_bench.load.workload import Session

_SHOWN = ("event_loop", "gc_pause", "oneloop:steps")
WARM_UP_REQUESTS, WARM_UP_STREAMS = 64, 32


class Requests:
    """Sessions of one request each. Every prompt is new to the server: none is found in its prefix cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: as read_options gives them."""
        self._source = prompt_source(_tokenizer(options), as_ids=options.token_ids)
        self._lengths = RandomLengths(options.prompt_tokens, options.output_tokens)
        self._rng = np.random.default_rng(0)

    def draw(self, count: int) -> list[Session]:
        """So many more."""
        return self._lengths.sessions(count, self._source, self._rng)

    def warm_up(self, port: int) -> None:
        """Send some that do not count."""
        closed_loop(port, "null", self.draw(WARM_UP_REQUESTS), WARM_UP_STREAMS)


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    return named_tokenizer(options.tokenizer or "smollm2")


class NullServer(NamedTuple):
    """A running server over a null executor, in a process of its own."""

    pid: int
    port: int


@contextmanager
def null_server(options: argparse.Namespace) -> Iterator[NullServer]:
    """options: as read_options gives them."""
    command = [sys.executable, "-m", "oneloop_bench.host_load", "--serve"]
    command += ["--step-ms", str(options.step_ms), "--token-us", str(options.token_us)]
    command += ["--row-us", str(options.row_us)]
    if options.tokenizer is not None:
        command += ["--tokenizer", options.tokenizer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield NullServer(process.pid, int(process.stdout.readline()))
        finally:
            process.send_signal(signal.SIGTERM)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run; times in ms but where the name says µs."""
    requests = Requests(options)
    sessions = requests.draw(options.requests)
    with null_server(options) as server:
        requests.warm_up(server.port)
        process = psutil.Process(server.pid)
        shown_before = loop_metrics(server.port)
        before, begin = process.cpu_times(), time.perf_counter()
        outcome = closed_loop(server.port, "null", sessions, options.streams)
        wall, after = time.perf_counter() - begin, process.cpu_times()
        shown = loop_metrics(server.port)
    cpu = after.user + after.system - before.user - before.system
    num_tokens = options.requests * options.output_tokens
    latencies = Latencies.of(outcome.records)
    return {
        "us_per_token": round(cpu / num_tokens * 1e6, 3),
        "wall_us_per_token": round(wall / num_tokens * 1e6, 3),
        "us_per_request": round(cpu / options.requests * 1e6, 1),
        "cpu_share": round(cpu / wall, 3),
        "tok_s": round(num_tokens / wall),
        "tokens_per_chunk": round(num_tokens / sum(len(record.times) for record in outcome.records), 2),
        "ttft_ms": percentiles(latencies.ttft),
        "itl_ms": percentiles(latencies.itl),
        "loop": {name: round(value - shown_before.get(name, 0.0), 4) for name, value in shown.items()},
    }


def percentiles(seconds: NDArray[np.float64]) -> dict[str, float]:
    """p50, p90, p99 and the longest, in ms."""
    if not len(seconds):
        return {}
    found = {f"p{share}": float(np.percentile(seconds, share)) for share in (50, 90, 99)}
    return {name: round(value * 1e3, 2) for name, value in {**found, "max": float(seconds.max())}.items()}


def loop_metrics(port: int) -> dict[str, float]:
    """What /metrics says of the event loop, by names without prefix: `part_seconds_total{part="send"}`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    found = {_short(name): float(value) for name, _, value in pairs if any(word in name for word in _SHOWN)}
    return {name: value for name, value in found.items() if "_created" not in name}


def _short(name: str) -> str:
    """Without the labels that are the same for all."""
    return re.sub(r'engine="0",?|model_name="[^"]*",?|oneloop:|event_loop_', "", name).replace("{}", "")


async def serve(tokenizer: Tokenizer, pace: Pace, times: LoopTimes) -> None:
    """The server, until SIGTERM; prints its port."""
    from oneloop.api.server import run_server
    from oneloop.config import ServerConfig
    from oneloop_bench.host import make_engine

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setblocking(False)
    # Each token a chunk: no character is cut.
    text = TEXT.encode("ascii", "ignore").decode()
    engine = make_engine(tokenizer, pace, max_num_batched_tokens=2048, text=text, loop_times=times)
    async with engine:
        settle_interpreter()
        print(sock.getsockname()[1], flush=True)
        await run_server(engine, ServerConfig(), sock, stop)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The load; None: what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=512, help="requests at once")
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--token-ids", action="store_true", help="prompts are token ids, not text")
    parser.add_argument("--step-ms", type=float, default=0.9, help="what a step takes")
    parser.add_argument("--token-us", type=float, default=1.5, help="… and more for each of its tokens")
    parser.add_argument("--row-us", type=float, default=9.0, help="… and for each of its rows")
    parser.add_argument("--tokenizer", help="folder; default: the embedded model's")
    parser.add_argument("--serve", action="store_true", help="be the server")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the figures."""
    options = read_options()
    if options.serve:
        times = LoopTimes()
        with asyncio.Runner(loop_factory=turn_loop(times)) as runner, times.watching_gc():
            pace = Pace(
                step_s=options.step_ms / 1e3, token_s=options.token_us / 1e6, row_s=options.row_us / 1e6
            )
            runner.run(serve(_tokenizer(options), pace, times))
        return
    print_figures(measure(options))


if __name__ == "__main__":
    main()
