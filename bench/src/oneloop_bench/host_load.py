"""The host under the load of a fast device: many prompts at once, streamed, in a closed loop.

`python -m oneloop_bench.host_load [--streams N --requests N --step-ms F --token-ids …]` starts a server over a null
executor whose steps take a device's time, drives it with a lean client and prints the server's CPU time, latencies and
its event loop's seconds by part. Latencies mean something where the machine has cores for both; CPU time always does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from oneloop.engine.event_loop import turn_loop
from oneloop.engine.interpreter import settle_interpreter
from oneloop.engine.loop_times import LoopTimes
from oneloop_bench.micro.core import TEXT
from oneloop_bench.report import print_result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from oneloop.tokenize.tokenizer import Tokenizer

_CHUNK = b'"choices":[{'
_LAST = b"0\r\n\r\n"
_SHOWN = ("event_loop", "gc_pause", "oneloop:steps")


@dataclass(slots=True)
class _Connection:
    """One client: its socket, and the request that is on its way."""

    sock: socket.socket
    sent: float = 0.0
    last: float | None = None
    """When the latest chunk came."""
    tail: bytes = b""


@dataclass(slots=True)
class _Records:
    """What the client saw, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_chunks: int = 0


class Client:
    """`num_streams` connections, each of which sends its next request when the one before has ended."""

    def __init__(self, port: int, bodies: Sequence[bytes], num_streams: int) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        )
        self._requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        self._port = port
        self._num_streams = min(num_streams, len(bodies))
        self._records = _Records()

    def run(self) -> _Records:
        """Until every request has its reply. RuntimeError when a connection ends early."""
        waiting = list(reversed(self._requests))
        with selectors.DefaultSelector() as selector:
            for _ in range(self._num_streams):
                sock = socket.create_connection(("127.0.0.1", self._port), timeout=60)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = _Connection(sock)
                selector.register(sock, selectors.EVENT_READ, connection)
                self._send(connection, waiting.pop())
            num_open = self._num_streams
            while num_open:
                for key, _ in selector.select(60):
                    if not self._read(key.data):
                        continue
                    if waiting:
                        self._send(key.data, waiting.pop())
                    else:
                        selector.unregister(key.fileobj)
                        key.data.sock.close()
                        num_open -= 1
        return self._records

    @staticmethod
    def _send(connection: _Connection, request: bytes) -> None:
        connection.sent, connection.last, connection.tail = time.perf_counter(), None, b""
        connection.sock.sendall(request)

    def _read(self, connection: _Connection) -> bool:
        """Take what has come; True at the reply's end."""
        received = connection.sock.recv(1 << 18)
        if not received:
            raise RuntimeError(f"the server closed a stream early: {connection.tail!r}")
        data = connection.tail + received
        count = data.count(_CHUNK)
        if count:
            now, records = time.perf_counter(), self._records
            records.num_chunks += count
            if connection.last is None:
                records.first.append(now - connection.sent)
                count -= 1
            else:
                records.gaps.append(now - connection.last)
            records.gaps.extend([0.0] * (count - 1))
            connection.last = now
        ended = data.endswith(_LAST)
        connection.tail = data[-11:].rpartition(_CHUNK)[2]
        return ended


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """A folder's; None: that of the embedded model."""
    from oneloop.tokenize.hf import hf_tokenizer
    from oneloop_bench.host import embedded_tokenizer

    return embedded_tokenizer() if folder is None else hf_tokenizer(folder)


def make_bodies(
    tokenizer: Tokenizer,
    count: int,
    *,
    prompt_tokens: int,
    output_tokens: int,
    token_ids: bool,
    model: str = "null",
) -> list[bytes]:
    """Prompts of words, as text or as token ids."""
    words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    clean = [
        number
        for number, word in enumerate(words)
        if word[:1] == b" " and word[1:].isalpha() and word.isascii()
    ]
    source = random.Random(0)

    def prompt() -> str | list[int]:
        ids = source.choices(clean, k=prompt_tokens)
        return ids if token_ids else b"".join(words[number] for number in ids).decode()

    return [
        json.dumps(
            {
                "model": model, "prompt": prompt(), "max_tokens": output_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            }
        ).encode()
        for _ in range(count)
    ]  # fmt: skip


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
        command += ["--tokenizer", str(options.tokenizer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield NullServer(process.pid, int(process.stdout.readline()))
        finally:
            process.send_signal(signal.SIGTERM)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one run; times in ms but where the name says µs."""
    bodies = make_bodies(
        load_tokenizer(options.tokenizer),
        options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        token_ids=options.token_ids,
    )
    with null_server(options) as server:
        Client(server.port, bodies[:64], 32).run()
        process = psutil.Process(server.pid)
        shown_before = loop_metrics(server.port)
        before, begin = process.cpu_times(), time.perf_counter()
        records = Client(server.port, bodies, options.streams).run()
        wall, after = time.perf_counter() - begin, process.cpu_times()
        shown = loop_metrics(server.port)
    cpu = after.user + after.system - before.user - before.system
    num_tokens = options.requests * options.output_tokens
    return {
        "us_per_token": round(cpu / num_tokens * 1e6, 3),
        "wall_us_per_token": round(wall / num_tokens * 1e6, 3),
        "us_per_request": round(cpu / options.requests * 1e6, 1),
        "cpu_share": round(cpu / wall, 3),
        "tok_s": round(num_tokens / wall),
        "tokens_per_chunk": round(num_tokens / records.num_chunks, 2),
        "ttft_ms": percentiles(records.first),
        "itl_ms": percentiles(records.gaps),
        "loop": {name: round(value - shown_before.get(name, 0.0), 4) for name, value in shown.items()},
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the longest, in ms."""
    if not seconds:
        return {}
    found = {f"p{share}": float(np.percentile(seconds, share)) for share in (50, 90, 99)}
    return {name: round(value * 1e3, 2) for name, value in {**found, "max": max(seconds)}.items()}


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


async def serve(
    tokenizer: Tokenizer, step_ms: float, token_us: float, row_us: float, times: LoopTimes
) -> None:
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
    engine = make_engine(
        tokenizer, step_ms / 1e3, token_us / 1e6, row_us / 1e6,
        max_num_batched_tokens=2048, text=text, loop_times=times,
    )  # fmt: skip
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
    parser.add_argument("--tokenizer", type=Path, help="folder; default: the embedded model's")
    parser.add_argument("--serve", action="store_true", help="be the server")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the figures."""
    options = read_options()
    if options.serve:
        times = LoopTimes()
        with asyncio.Runner(loop_factory=turn_loop(times)) as runner, times.watching_gc():
            tokenizer = load_tokenizer(options.tokenizer)
            runner.run(serve(tokenizer, options.step_ms, options.token_us, options.row_us, times))
        return
    result = measure(options)
    for name, value in result.items():
        print(f"{name}: {value}")
    print_result(result)


if __name__ == "__main__":
    main()
