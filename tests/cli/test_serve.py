"""The server's life: loading, serving, draining, ending, by real signals to a real process."""

import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oneloop.cli.serve import MAX_DESCRIPTORS, allow_many_descriptors, warn_of_few_descriptors
from oneloop_bench.server import free_port

LONG = {
    "model": "tiny",
    "prompt": "go on",
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


def open_stream(server):
    """(connection, response) of a long streamed completion whose first event has come."""
    connection = server.connect()
    connection.request("POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


def test_503_while_loading_then_serving_then_a_clean_end(serving):
    with serving("--served-model-name", "tiny") as server:
        server.wait_for_status(503)
        status, body = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})
        assert (status, body["error"]["code"]) == (503, 503)
        server.wait_for_status(200)
        status, body = server.request(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        )
        assert status == 200
        assert body["usage"]["completion_tokens"] == 4
        code, errors = server.end(signal.SIGINT)
        assert code == 0
        assert "Traceback" not in errors
        assert "weights: 100%" in errors  # the progress bar
        (ready,) = [line for line in errors.splitlines() if "ready after" in line]
        for part in ("process", "import torch", "weights", "tokenizer", "import api"):
            assert re.search(rf"[:,] {part} \d+\.\d", ready), part


def test_the_grace_period_is_told_where_there_is_something_to_wait_for(serving):
    with serving() as server:
        server.wait_for_status(200)
        _, errors = server.end(signal.SIGINT)
    assert "stopping" in errors
    assert "running requests get" not in errors
    with serving("--log-level", "warning") as server:
        server.wait_for_status(200)
        _, errors = server.end(signal.SIGINT)
    assert " INFO " not in errors


def test_sigterm_drains_what_runs(serving):
    with serving("--served-model-name", "tiny", "--shutdown-timeout", "20") as server:
        server.wait_for_status(200)
        connection, response = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        rest = response.read()
        connection.close()
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert b'"finish_reason":"length"' in rest
        _, errors = server.process.communicate(timeout=15)
        assert server.process.returncode == 0
        assert "Traceback" not in errors
        assert "running requests get 20 s" in errors


@pytest.mark.parametrize("options", [["--shutdown-timeout", "0"]])
def test_without_drain_the_end_is_quick(serving, options):
    with serving("--served-model-name", "tiny", *options) as server:
        server.wait_for_status(200)
        connection, _ = open_stream(server)
        begin = time.monotonic()
        code, errors = server.end()
        connection.close()
        assert time.monotonic() - begin < 3
        assert code == 0
        assert "Traceback" not in errors


def test_a_signal_while_loading_ends_within_seconds(serving):
    with serving() as server:
        server.wait_for_status(503)
        begin = time.monotonic()
        code, errors = server.end()
        assert time.monotonic() - begin < 5
        assert code == 0
        assert "Traceback" not in errors


INTERRUPTED_LATE = """
import os, signal, sys, time
from oneloop.cli.main import main
from oneloop.cli.serve import _Serving

def import_api(self):
    time.sleep(0.5)  # a null model takes some ms
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

_Serving._import_api = import_api
sys.exit(main(["serve", "--executor", "null", "--port", sys.argv[1]]))
"""


def test_a_signal_when_nearly_all_is_loaded():
    """The model is there, and something else is not: what was asked to stop does not say that it serves."""
    command = [sys.executable, "-c", INTERRUPTED_LATE, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "sequences at once" in done.stderr, "the model was loaded"
    assert "stopping" in done.stderr
    assert not re.search("Traceback|ready after|serving", done.stderr)


def test_who_connects_while_it_loads_is_watched_too(serving):
    """The kernel's timer of the server's side is the one of keep-alives."""
    with serving() as server:
        server.wait_for_status(503)
        connection = server.connect()
        connection.connect()
        port = connection.sock.getsockname()[1]
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        (timer,) = (line[5] for line in lines if line[2].endswith(f":{port:04X}"))
        connection.close()
        assert timer.startswith("02:")


def wait_until_waiting(server, count):
    """Until that many requests wait for a row."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        connection = server.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        if float(re.search(r"^oneloop:num_requests_waiting\{.*\} (.*)$", text, re.MULTILINE)[1]) >= count:
            return
        time.sleep(0.02)
    pytest.fail(f"{count} requests never waited")


def test_a_second_signal_ends_at_once(serving):
    with serving("--served-model-name", "tiny", "--shutdown-timeout", "600", "--max-num-seqs", "1") as server:
        server.wait_for_status(200)
        streams = [open_stream(server)]
        # More than the drain can finish soon: they wait for the one row.
        for _ in range(20):
            connection = server.connect()
            connection.request(
                "POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"}
            )
            streams.append((connection, None))
        wait_until_waiting(server, 15)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        begin = time.monotonic()
        code, errors = server.end()
        for connection, _ in streams:
            connection.close()
        assert time.monotonic() - begin < 3
        assert code == 128 + signal.SIGTERM
        assert "Traceback" not in errors


def test_a_dead_engine_ends_the_process(serving):
    """An impossible step limit stands in for a step that hangs: one error to the client, then exit code 1."""
    with serving("--served-model-name", "tiny", "--step-timeout-s", "0.001") as server:
        server.wait_for_status(200)
        body = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 200, "ignore_eos": True}
        status, reply = server.request("POST", "/v1/completions", body)
        assert status in (500, 503)
        assert "error" in reply
        _, errors = server.process.communicate(timeout=15)
        assert server.process.returncode == 1
        assert "did not complete within 0.001 s" in errors


def test_the_limit_of_descriptors_is_raised(monkeypatch):
    """To what the process may have, and never lowered."""
    limits, hard = [], 5000
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append((kind, pair)))
    for soft, expected, reached in (
        (1024, [(resource.RLIMIT_NOFILE, (5000, 5000))], 5000),
        (5000, [], 5000),
        (resource.RLIM_INFINITY, [], MAX_DESCRIPTORS),
    ):
        limits.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, hard))
        assert allow_many_descriptors() == reached
        assert limits == expected


def test_too_few_descriptors_are_told(caplog):
    """Streams take two each; the message says what to raise."""
    warn_of_few_descriptors(2 * 256 + 100, 256)
    assert not caplog.messages
    warn_of_few_descriptors(300, 256)
    (message,) = caplog.messages
    assert "300 descriptors" in message
    assert "ulimit -Hn" in message
