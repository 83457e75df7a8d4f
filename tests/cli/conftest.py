"""Commands as child processes, on the tiny model without weights."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]
MODEL_OPTIONS = ["--load-format", "dummy", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]


class ServerProcess:
    """A running `oneloop serve` on loopback."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def connect(self, timeout_s: float = 30) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
            return reply.status, json.loads(data) if data else None
        finally:
            connection.close()

    def wait_for_status(self, status: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server has ended"
            try:
                if self.request("GET", "/health")[0] == status:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        pytest.fail(f"/health never answered {status}")

    def end(self, number: int = signal.SIGTERM, limit_s: float = 15) -> tuple[int, str]:
        """Exit code and stderr after a signal."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=limit_s)
        return self.process.returncode, errors


@pytest.fixture
def serving(tiny_model: Path):
    """A context manager that starts a server with more options, not waiting for it to be ready."""

    @contextmanager
    def start(*options: str) -> Iterator[ServerProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [*ONELOOP, "serve", str(tiny_model), "--port", str(port), *MODEL_OPTIONS, *options],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield ServerProcess(process, port)
        finally:
            process.kill()
            process.communicate()

    return start
