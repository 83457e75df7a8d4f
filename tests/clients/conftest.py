"""A real `oneloop serve` process with the embedded model, one for all tests of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "test-key"
START_LIMIT_S = 90.0


@dataclass(frozen=True)
class LiveServer:
    """Where it listens, and its key."""

    url: str
    key: str

    def get(self, path: str) -> str:
        """Body of a GET with the key."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())

    def running(self) -> float:
        """Sequences in the batch, from /metrics."""
        line = next(
            line
            for line in self.get("/metrics").splitlines()
            if line.startswith("oneloop:num_requests_running{")
        )
        return float(line.rsplit(" ", 1)[1])

    def wait_idle(self) -> None:
        """Wait until nothing runs any more."""
        deadline = time.monotonic() + 10
        while self.running() > 0:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server; it must end by SIGTERM with code 0."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    command = [
        str(Path(sys.executable).with_name("oneloop")), "serve", "smollm2", "--port", str(port), "--api-key", KEY,
        "--max-model-len", "1024", "--kv-cache-memory", "128M", "--max-num-seqs", "16",
        "--tool-call-parser", "hermes", "--enable-auto-tool-choice",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "2"}
        )
    try:
        wait_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield LiveServer(f"http://127.0.0.1:{port}", KEY)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()[-2000:]
    finally:
        process.kill()
        process.wait()


def wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError, urllib.error.HTTPError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise AssertionError(f"not healthy after {START_LIMIT_S} s: {log.read_text()[-2000:]}")


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
async def async_client(live: LiveServer) -> Any:
    """The official client for asyncio."""
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key=live.key, max_retries=0, timeout=60
    ) as made:
        yield made
