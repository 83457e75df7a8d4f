"""What idle connections cost: memory each, and what 10,000 of them do to 100 that are active.

`make bench-idle`. Connections that never send a byte, that had a stream, and that had a reply in one piece; the streams
of the active ones run as fast as they can. Then the idle ones are left alone until the server has closed them.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from oneloop.api.limits import HEADER_TIMEOUT_S
from oneloop.cli.serve import allow_many_descriptors
from oneloop_bench.report import BenchError, print_result, run_bench
from oneloop_bench.serve_null.client import count_streams, make_requests, request_bytes
from oneloop_bench.serve_null.machine import Cpus, Shares, choose_cpus, null_server, undisturbed

if TYPE_CHECKING:
    from types import TracebackType

NUM_ACTIVE = 100
NUM_TOKENS = 512
SHORT_TOKENS = 16
SHORT_ROUNDS = 10
MAX_KIB = 50.0
MAX_RATIO = 1.1
_STREAM = request_bytes({"prompt": "hello", "max_tokens": 4})
_WHOLE = request_bytes({"prompt": "hello", "max_tokens": 4, "stream": False, "stream_options": None})
KINDS = {"silent": b"", "had_a_stream": _STREAM, "had_a_reply": _WHOLE}
"""What each idle connection has asked before."""
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n")


def _is_whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n")
    return body.endswith(b"\r\n0\r\n\r\n") if length is None else len(body) >= int(length[1])


class Crowd:
    """Idle connections. A context manager: at its end all are closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in self.sockets:
            sock.close()

    def add(self, count: int, kind: str) -> None:
        """Connect; ask what each of this kind asks, and read the reply."""
        request = KINDS[kind]
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", self._port), timeout=30)
            self.sockets.append(sock)
            if request:
                sock.sendall(request)
                reply = b""
                while not _is_whole(reply):
                    piece = sock.recv(1 << 16)
                    if not piece:
                        raise RuntimeError(f"the server closed a connection early: {reply[-200:]!r}")
                    reply += piece

    def num_closed(self) -> int:
        """How many the server has closed."""
        closed = 0
        for sock in self.sockets:
            readable = select.poll()
            readable.register(sock, select.POLLIN)
            closed += bool(readable.poll(0)) and not sock.recv(1, socket.MSG_PEEK)
        return closed


def memory_kib(pid: int) -> float:
    """Resident memory of its own."""
    return float(psutil.Process(pid).memory_info().rss) / 1024


def measure_memory(cpus: Cpus, count: int) -> dict[str, float]:
    """KiB per connection of each kind, each in a server of its own: memory that was free does not show."""
    found = {}
    for kind in KINDS:
        with null_server(cpus, 2 * NUM_ACTIVE, NUM_TOKENS) as server, Crowd(server.port) as crowd:
            pid = server.process.pid
            measure_active(server.port, pid)
            before = memory_kib(pid)
            crowd.add(count, kind)
            settle(server.port)
            found[kind] = round((memory_kib(pid) - before) / count, 2)
    return found


def settle(port: int) -> None:
    """Until the server has looked at every connection: it answers one that was made later."""
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            sock.recv(1 << 12)
        time.sleep(0.1)


def measure_active(port: int, pid: int) -> dict[str, float]:
    """100 connections: long streams, then many short ones."""
    shares = Shares(pid)
    long = count_streams(port, make_requests(2 * NUM_ACTIVE, NUM_TOKENS), NUM_ACTIVE, NUM_TOKENS)
    cost = shares.us_per_event(long)["server_us_per_event"]
    shorts = make_requests(SHORT_ROUNDS * NUM_ACTIVE, SHORT_TOKENS)
    short = count_streams(port, shorts, NUM_ACTIVE, SHORT_TOKENS)
    p50, p99 = np.percentile(np.array(short.first) * 1e3, [50, 99])
    return {
        "us_per_event": long.wall_s / long.num_events * 1e6,
        "server_us_per_event": cost,
        "ttft_p50_ms": float(p50),
        "ttft_p99_ms": float(p99),
    }


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


def measure_slowdown(cpus: Cpus, num_idle: int, repeats: int) -> dict[str, Any]:
    """The active ones alone, with the crowd, and alone again; the crowd closed by the server in the end."""
    with null_server(cpus, 2 * NUM_ACTIVE, NUM_TOKENS) as server, Crowd(server.port) as crowd:
        pid = server.process.pid
        measure_active(server.port, pid)
        alone = [measure_active(server.port, pid) for _ in range(repeats)]
        began = time.monotonic()
        for kind in KINDS:
            crowd.add(num_idle // len(KINDS) + (kind == "silent") * (num_idle % len(KINDS)), kind)
        settle(server.port)
        beside = [measure_active(server.port, pid) for _ in range(repeats)]
        took_s, num_closed = time.monotonic() - began, crowd.num_closed()
        if num_closed:
            raise RuntimeError(f"{num_closed} idle connections were closed after {took_s:.0f} s already")
        while crowd.num_closed() < num_idle and time.monotonic() - began < took_s + HEADER_TIMEOUT_S + 5:
            time.sleep(1)
        num_closed = crowd.num_closed()
        alone += [measure_active(server.port, pid) for _ in range(repeats)]
    before, after = _medians(alone), _medians(beside)
    return {
        "alone": before,
        "beside": after,
        "ratios": {name: round(after[name] / before[name], 3) for name in before},
        "num_idle": num_idle,
        "num_closed_by_server": num_closed,
    }


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    limit = allow_many_descriptors()
    if limit < options.idle + 1000:
        raise BenchError(f"{options.idle} connections need more descriptors than {limit}: raise `ulimit -Hn`")
    cpus = choose_cpus()
    with undisturbed() as is_undisturbed:
        memory = measure_memory(cpus, options.idle // 2)
        print(f"KiB per idle connection: {memory}", flush=True)
        slowdown = measure_slowdown(cpus, options.idle, options.repeats)
        print(f"{json.dumps(slowdown)}", flush=True)
    ratios = slowdown["ratios"]
    print_result(
        {
            "rss_kib_per_idle": max(memory.values()),
            "slowdown": ratios["us_per_event"],
            "ttft_p99_ratio": ratios["ttft_p99_ms"],
            "rss_kib": memory,
            **slowdown,
            "undisturbed": is_undisturbed,
            "goals": {"rss_kib_per_idle": MAX_KIB, "slowdown": MAX_RATIO, "ttft_p99_ratio": MAX_RATIO},
        }
    )


if __name__ == "__main__":
    run_bench(main)
