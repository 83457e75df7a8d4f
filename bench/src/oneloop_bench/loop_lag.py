"""How late the event loop sees what happens, while prompts come that are much work: `python -m oneloop_bench.loop_lag`.

64 streams run at 5 ms a step; beside them nothing, then prompts of 100,000 tokens (text, and a chat), then 500 requests
within a second, each on a new connection. How late the loop may be is the length of its turns
(`oneloop:event_loop_turn_seconds` of /metrics): told are the upper bounds of the buckets that hold the 99.9th
percentile and the longest. The gaps are those that the running streams' client sees. The tokenizer and the chat
template are the embedded model's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import multiprocessing
import random
import re
import socket
import statistics
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop.cli.serve import allow_many_descriptors
from oneloop_bench.report import print_result, run_bench
from oneloop_bench.serve_null.client import count_streams, make_requests, request_bytes
from oneloop_bench.server import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_STREAMS = 64
STEP_MS = 5.0
NUM_TOKENS = 800
LEAD_IN = 60
LONG_TOKENS = 100_000
BURST = 500
BURST_TOKENS = 16
MAX_P999_MS, MAX_MS = 50.0, 200.0
_WORDS = (
    "time",
    "water",
    "machine",
    "of",
    "the",
    "morning",
    "seven",
    "light",
    "because",
    "wheel",
    "paper",
    "under",
)
"""A token each, with the space before it."""
_BUCKET = re.compile(r'^oneloop:event_loop_turn_seconds_bucket\{.*le="([^"]+)".*\} (\S+)$', re.MULTILINE)


def words(count: int, seed: int) -> str:
    """A text of about so many tokens."""
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


def turns(port: int) -> dict[float, float]:
    """Turns of the server's event loop so far, by upper bound in seconds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        found = _BUCKET.findall(reply.read().decode())
    return {math.inf if bound == "+Inf" else float(bound): float(count) for bound, count in found}


def lag_ms(before: dict[float, float], after: dict[float, float]) -> dict[str, float]:
    """Turns since, and upper bounds of their 99.9th percentile and of the longest in ms."""
    bounds = sorted(after)
    counts = [after[bound] - before[bound] for bound in bounds]  # cumulative
    longest = next(bound for bound, count in zip(bounds, counts, strict=True) if count == counts[-1])
    p999 = next(bound for bound, count in zip(bounds, counts, strict=True) if count >= 0.999 * counts[-1])
    return {"num_turns": counts[-1], "lag_p999_ms": p999 * 1e3, "lag_max_ms": longest * 1e3}


def send_long_prompts(port: int) -> None:
    """Two of them, one after the other."""
    common = {"max_tokens": 1, "ignore_eos": True}
    _post(port, "/v1/completions", {**common, "prompt": words(LONG_TOKENS, 1)})
    _post(
        port,
        "/v1/chat/completions",
        {**common, "messages": [{"role": "user", "content": words(LONG_TOKENS, 2)}]},
    )


def _post(port: int, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    usage = json.loads(reply.read()).get("usage", {})
    connection.close()
    if reply.status != 200 or usage["prompt_tokens"] < LONG_TOKENS:
        raise RuntimeError(f"{path}: status {reply.status}, {usage}")


def send_burst(port: int) -> None:
    """500 within a second, at even distances; all replies are read."""
    requests = [
        request_bytes({"prompt": words(128, number), "max_tokens": BURST_TOKENS}) for number in range(BURST)
    ]
    began, sockets = time.perf_counter(), []
    for number, request in enumerate(requests):
        time.sleep(max(began + number / BURST - time.perf_counter(), 0.0))
        sockets.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        sockets[-1].sendall(request)
    took_s = time.perf_counter() - began
    for sock in sockets:
        reply = b""
        while not reply.endswith(b"\r\n0\r\n\r\n"):
            piece = sock.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"a reply broke off: {reply[-200:]!r}")
            reply += piece
        sock.close()
    if took_s > 1.5:
        raise RuntimeError(f"the burst took {took_s:.1f} s to send: the machine is too busy to tell anything")


def measure_window(port: int, disturb: Callable[[int], None] | None) -> dict[str, float]:
    """Streams, and meanwhile whatever a process of its own does."""
    process = (
        None
        if disturb is None
        else multiprocessing.get_context("spawn").Process(target=disturb, args=(port,))
    )
    before = turns(port)
    if process is not None:
        process.start()
    requests = make_requests(NUM_STREAMS, NUM_TOKENS)
    counts = count_streams(port, requests, NUM_STREAMS, NUM_TOKENS, lead_in=LEAD_IN)
    if process is not None:
        process.join(60)
        if process.exitcode != 0:
            raise RuntimeError(f"{process.name} ended with {process.exitcode}")
    gaps = np.array(counts.gaps) * 1e3
    shares = {"p50": 50, "p99": 99, "max": 100}
    itl = {f"itl_{name}_ms": round(float(np.percentile(gaps, share)), 2) for name, share in shares.items()}
    return {**lag_ms(before, turns(port)), **itl}


WINDOWS: dict[str, Callable[[int], None] | None] = {
    "quiet": None,
    "long_prompts": send_long_prompts,
    "burst": send_burst,
}
"""What happens beside the streams."""


def measure(repeats: int, names: Sequence[str] = tuple(WINDOWS)) -> dict[str, Any]:
    """Each of these windows so often; of its runs the worst lag, and medians of the gaps."""
    options = [
        "--executor",
        "null",
        "--null-step-ms",
        str(STEP_MS),
        "--max-num-seqs",
        str(NUM_STREAMS + BURST),
    ]
    options += ["--max-model-len", str(LONG_TOKENS + 1024), "--max-num-batched-tokens", "2048"]
    found: dict[str, Any] = {}
    with running_server(*options) as server:
        server.wait_ready()
        measure_window(server.port, send_burst)
        for name in names:
            runs = [measure_window(server.port, WINDOWS[name]) for _ in range(repeats)]
            found[name] = {
                key: (max if key.startswith("lag") else statistics.median)([run[key] for run in runs])
                for key in runs[0]
            }
            print(f"{name}: {found[name]}", flush=True)
    return found


def main() -> None:
    """Print the figures; the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    allow_many_descriptors()
    found = measure(options.repeats)
    worst = {name: max(window[name] for window in found.values()) for name in ("lag_p999_ms", "lag_max_ms")}
    print_result({**worst, **found, "goals": {"lag_p999_ms": MAX_P999_MS, "lag_max_ms": MAX_MS}})


if __name__ == "__main__":
    run_bench(main)
