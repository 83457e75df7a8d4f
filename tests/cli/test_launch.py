"""`oneloop launch render`: a process that writes prompts and reads replies, without a model and without torch."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = [{"role": "user", "content": "Hi"}]


class Rendering:
    """A running `oneloop launch render`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
            is_json = reply.headers["Content-Type"] == "application/json"
            return reply.status, json.loads(data) if is_json else data
        finally:
            connection.close()


@pytest.fixture
def rendering(tiny_model: Path) -> Iterator[Rendering]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "oneloop.cli.main",
        "launch",
        "render",
        str(tiny_model),
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, "--served-model-name", "tiny"], stderr=subprocess.PIPE, text=True)
    server = Rendering(process, port)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            try:
                if server.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.communicate()


def test_prompts_and_replies_without_a_model(rendering: Rendering) -> None:
    status, body = rendering.request("POST", "/v1/chat/completions/render", {"messages": HELLO, "stop": "x"})
    assert status == 200
    assert body["model"] == "tiny"
    status, tokens = rendering.request("POST", "/tokenize", {"messages": HELLO})
    assert tokens["tokens"] == body["token_ids"]
    answered = {
        "index": 0,
        "token_ids": tokens["tokens"][1:5],
        "finish_reason": "length",
        "stop_reason": None,
    }
    generated = {"request_id": body["request_id"], "choices": [answered]}
    status, reply = rendering.request(
        "POST", "/derender", {"generate_response": generated, "prompt_token_ids": body["token_ids"]}
    )
    assert status == 200, reply
    assert reply["choices"][0]["message"]["content"] == "user"
    assert reply["usage"]["prompt_tokens"] == len(body["token_ids"])
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/inference/v1/generate", {"token_ids": [1]}),
    ):
        assert rendering.request("POST", path, body)[0] == 404
    assert rendering.request("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    status, metrics = rendering.request("GET", "/metrics")
    assert b"http_requests_total" in metrics


def test_no_torch_and_a_clean_end(rendering: Rendering) -> None:
    maps = Path(f"/proc/{rendering.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "oneloop_core" in maps
    rendering.process.send_signal(signal.SIGTERM)
    _, errors = rendering.process.communicate(timeout=20)
    assert rendering.process.returncode == 0
    assert "rendering for tiny (hf) on http://127.0.0.1" in errors
    assert "Traceback" not in errors


def test_a_length_is_needed(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    command = [sys.executable, "-m", "oneloop.cli.main", "launch", "render", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--max-model-len" in done.stderr
