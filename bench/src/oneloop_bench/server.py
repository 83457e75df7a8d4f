"""A oneloop server as a child process, for benches and end-to-end tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

START_LIMIT_S = 120.0


class Server:
    """A running `oneloop serve`. port: where it listens on loopback."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 120.0) -> tuple[int, Any]:
        """One JSON request; returns (status, parsed reply). OSError while nothing listens yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
            is_json = "json" in (reply.headers.get("Content-Type") or "")
            return reply.status, json.loads(data) if is_json else data
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Until /health answers 200. RuntimeError when the process ends first or START_LIMIT_S passes."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}")
            try:
                if self.request("GET", "/health", timeout_s=5.0)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready within {START_LIMIT_S:.0f} s")


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server(
    *arguments: str,
    model: str = "smollm2",
    quiet: bool = True,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start `oneloop serve`, yield at once (see Server.wait_ready), end it with SIGTERM.

    quiet: what it prints is thrown away; or goes into the file `log`. environment: variables added to this process's
    own.
    """
    port = free_port()
    command = [sys.executable, "-m", "oneloop.cli.main", "serve", model, "--port", str(port), *arguments]
    variables = {**os.environ, **(environment or {})}
    with ExitStack() as stack:
        output = subprocess.DEVNULL if quiet else None
        if log is not None:
            output = stack.enter_context(log.open("w")).fileno()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
    try:
        yield Server(process, port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
