"""The host's cost per streamed token through HTTP: a server process over steps that take no time, and a plain reader.

`python -m oneloop_bench.host http` measures it; `python -m oneloop_bench.host_http STEP_MS` is the server, on a port
that it prints.
"""

from __future__ import annotations

import asyncio
import gc
import json
import selectors
import signal
import socket
import subprocess
import sys
import time

import psutil

from oneloop.api.server import run_server
from oneloop.config import ServerConfig

END = b"data: [DONE]"


def measure(num_streams: int, num_tokens: int, prompt_tokens: int, *, step_ms: float) -> dict[str, float]:
    """µs of the server's CPU time per token of num_streams completions at once, each of num_tokens tokens.

    step_ms: how long a step takes.
    """
    command = [sys.executable, "-m", "oneloop_bench.host_http", str(step_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            read_streams(port, 16, 16, prompt_tokens)
            process = psutil.Process(server.pid)
            before, begin = process.cpu_times(), time.perf_counter()
            num_chunks = read_streams(port, num_streams, num_tokens, prompt_tokens)
            wall, after = time.perf_counter() - begin, process.cpu_times()
        finally:
            server.send_signal(signal.SIGTERM)
    cpu = after.user + after.system - before.user - before.system
    total = num_streams * num_tokens
    return {
        "us_per_token": round(cpu / total * 1e6, 3),
        "wall_us_per_token": round(wall / total * 1e6, 3),
        "tokens_per_chunk": round(total / num_chunks, 2),
    }


def read_streams(port: int, num_streams: int, num_tokens: int, prompt_tokens: int) -> int:
    """Ask for that many completions at once and read them to their end; returns the chunks with text."""
    body = json.dumps(
        {
            "model": "null", "prompt": [300] * prompt_tokens, "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    num_chunks = 0
    with selectors.DefaultSelector() as selector:
        tails: dict[int, bytes] = {}
        for _ in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ)
            tails[connection.fileno()] = b""
        while tails:
            for key, _ in selector.select(60):
                connection = key.fileobj  # type: ignore[assignment]
                data = tails[key.fd] + connection.recv(1 << 18)
                num_chunks += data.count(b'"choices":[{')
                if END in data:
                    selector.unregister(connection)
                    connection.close()
                    del tails[key.fd]
                elif data == tails[key.fd]:
                    raise RuntimeError(f"the server closed a stream early: {data!r}")
                else:
                    # What may be the beginning of a mark that was cut; no whole one is counted twice.
                    tails[key.fd] = data[-11:].rpartition(b'"choices":[{')[2]
    return num_chunks


async def serve(step_ms: float) -> None:
    """Until SIGTERM."""
    from oneloop_bench.host import embedded_tokenizer, make_engine

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setblocking(False)
    async with make_engine(embedded_tokenizer(), step_ms / 1000) as engine:
        gc.collect()
        gc.freeze()
        print(sock.getsockname()[1], flush=True)
        await run_server(engine, ServerConfig(), sock, stop)


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
