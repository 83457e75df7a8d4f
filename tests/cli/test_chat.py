"""`oneloop chat`: history, commands, Ctrl-C, and the client side of --url."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from oneloop.cli.chat import Conversation
from oneloop.cli.session import RemoteModel
from oneloop.engine.params import SamplingParams
from oneloop.errors import ConfigError, GenerationError, RequestError

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]
PARAMS = SamplingParams(max_tokens=20)


class Echo:
    """Answers with the number of messages it saw."""

    def __init__(self, fail_on=()):
        self.seen = []
        self.fail_on = fail_on

    def reply(self, messages, params):
        self.seen.append([dict(message) for message in messages])
        for number, piece in enumerate(["reply ", "to ", messages[-1]["content"]]):
            if messages[-1]["content"] == "interrupt" and number == 2:
                raise KeyboardInterrupt
            yield piece
        if messages[-1]["content"] in self.fail_on:
            raise RequestError("messages", "too long")


def converse(monkeypatch, model, lines, *, tty=False, system=None):
    stdin = io.StringIO(lines)
    stdin.isatty = lambda: tty
    monkeypatch.setattr(sys, "stdin", stdin)
    return Conversation(model, PARAMS, system=system).run()


def test_history_and_reset(monkeypatch, capsys):
    model = Echo()
    assert converse(monkeypatch, model, "one\n\ntwo\n/reset\nthree\n/exit\nnever\n", system="be kind") == 0
    contents = [[message["content"] for message in seen] for seen in model.seen]
    assert contents == [
        ["be kind", "one"],
        ["be kind", "one", "reply to one", "two"],
        ["be kind", "three"],
    ]
    assert capsys.readouterr().out == "reply to one\nreply to two\nreply to three\n"


def test_a_refused_message_is_not_kept(monkeypatch, capsys):
    model = Echo(fail_on={"bad"})
    assert converse(monkeypatch, model, "bad\ngood\n") == 0
    assert [message["content"] for message in model.seen[1]] == ["good"]
    assert "oneloop: error: too long" in capsys.readouterr().err
    assert converse(monkeypatch, Echo(fail_on={"bad"}), "bad\n") == 1


def test_ctrl_c_stops_the_answer_and_keeps_what_came(monkeypatch, capsys):
    model = Echo()
    assert converse(monkeypatch, model, "interrupt\nnext\n", tty=True) == 0
    assert [message["content"] for message in model.seen[1]] == ["interrupt", "reply to ", "next"]
    with pytest.raises(KeyboardInterrupt):
        converse(monkeypatch, Echo(), "interrupt\nnext\n", tty=False)


def sse(*events):
    return b"".join(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
                    for event in events)  # fmt: skip


def piece(text):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


@pytest.fixture
def server():
    """An HTTP server that records requests and answers with `reply`: (status, body)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.requests.append((self.path, dict(self.headers), json.loads(body)))
            status, data = self.server.reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.requests = []
        http.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def test_remote_stream(server):
    server.reply = (
        200,
        b": keep-alive\n\n" + sse(piece(""), piece("Grüß "), piece("Gott"), {"choices": []}, b"[DONE]"),
    )
    model = RemoteModel(server.url + "/v1/", model="m", api_key="secret")
    params = SamplingParams(max_tokens=5, temperature=0.5, stop=["x"])
    assert "".join(model.reply([{"role": "user", "content": "hi"}], params)) == "Grüß Gott"
    (path, headers, body), = server.requests  # fmt: skip
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "messages": [{"role": "user", "content": "hi"}], "stream": True, "model": "m", "max_tokens": 5,
        "temperature": 0.5, "stop": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "data", "error", "message"),
    [
        (400, b'{"error":{"message":"too long","code":400}}', RequestError, "too long"),
        (401, b'{"error":"Unauthorized"}', RequestError, "Unauthorized"),
        (502, b"<html>", RequestError, "status 502"),
        (200, sse(piece("a"), {"error": {"message": "it broke"}}, b"[DONE]"), GenerationError, "it broke"),
        (200, sse(piece("a")), GenerationError, "before it was complete"),
        (200, sse(b"nonsense"), GenerationError, "no event"),
    ],
)
def test_remote_failures(server, status, data, error, message):
    server.reply = (status, data)
    with pytest.raises(error, match=message):
        list(RemoteModel(server.url).reply([{"role": "user", "content": "hi"}], PARAMS))


def test_nobody_there():
    with pytest.raises(GenerationError, match=r"http://127\.0\.0\.1:1; is the server running"):
        list(RemoteModel("127.0.0.1:1").reply([], PARAMS))


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999", "http://x:port"])
def test_bad_addresses(url):
    with pytest.raises(ConfigError, match="url: "):
        RemoteModel(url)


def test_in_process_and_over_a_server(tiny_model, serving):
    """The same conversation, model loaded here and behind a server: same words."""
    sampling = ["--temperature", "0", "--max-tokens", "6"]
    options = ["--load-format", "dummy", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]
    here = subprocess.run(
        [*ONELOOP, "chat", str(tiny_model), *options, *sampling], input="hi\nagain\n", capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (here.returncode, here.stderr) == (0, "")
    with serving() as server:
        server.wait_for_status(200)
        there = subprocess.run(
            [*ONELOOP, "chat", "--url", f"http://127.0.0.1:{server.port}", *sampling], input="hi\nagain\n",
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert (there.returncode, there.stderr, there.stdout) == (0, "", here.stdout)


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, command):
        self._main, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )
        os.close(terminal)
        self.seen = b""

    def wait_for(self, pattern, limit_s=60):
        """Read until the pattern is found behind what was found before."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.seen):
                self.seen = self.seen[found.end() :]
                return
            if select.select([self._main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._main, 4096)
                except OSError:  # the other side is closed
                    break
        pytest.fail(f"{pattern!r} not found in {self.seen!r}")

    def type(self, text):
        os.write(self._main, text)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def test_ctrl_c_in_a_terminal_stops_the_answer_then_the_chat(tiny_model):
    options = ["--load-format", "dummy", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]
    terminal = Terminal([*ONELOOP, "chat", str(tiny_model), *options, "--temperature", "0"])
    try:
        terminal.wait_for(b">>> ")
        terminal.type(b"hello\n")
        terminal.wait_for(b"hello\r?\n[^\n]+")  # the echo, then some of an answer that would be long
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(b">>> ", limit_s=10)
        terminal.type(b"/reset\n")
        terminal.wait_for(b">>> ", limit_s=10)
        assert terminal.process.poll() is None
        # A signal between readline's prompt and its wait for a key waits for that key (CPython); people are slower.
        time.sleep(0.5)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(10) == 130
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.close()
