"""Errors that people run into first: one line that names what to do; and nothing is ignored in silence."""

from __future__ import annotations

import http.server
import os
import pty
import subprocess
import sys
import threading

import pytest

from oneloop.cli.main import main
from oneloop.cli.session import RemoteModel
from oneloop.engine.params import SamplingParams
from oneloop.errors import ConfigError, ModelError, RequestError
from oneloop.loader.resolve import resolve_model
from oneloop.tokenize.load import load_tokenizer

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]
DUMMY = ["--load-format", "dummy", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--host", "192.0.2.1"], "host: cannot listen on 192.0.2.1:8000"),
        (["serve", "--host", "192.0.2.1"], "give an address of this machine, or 0.0.0.0 for all"),
        (
            ["generate", "--model", "", "x"],
            "model: is empty; give a folder, a GGUF file, a hub id or smollm2",
        ),
        (
            ["serve", "smollm2", "--revision", "main", "--plan"],
            "revision: is of hub models, and smollm2 is none",
        ),
        (["serve", "./nothing/here", "--plan"], "the model that needs no hub is called smollm2"),
    ],
)
def test_one_line_with_the_remedy(arguments, says, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_an_unknown_option_shows_the_commands_own_usage(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--nope", "x"])
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: oneloop {command} [")
    assert error == f"oneloop {command}: error: unrecognized arguments: --nope"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--generation-config", "/nope"],
            "generation_config: /nope is no folder with a generation_config.json",
        ),
        (["--max-tokens", "100000"], "the prompt has 3 and max_tokens asks for 100000 more"),
    ],
)
def test_what_is_found_out_late_is_one_line_too(tiny_model, options, says):
    command = [*ONELOOP, "generate", "--model", str(tiny_model), *DUMMY, *options, "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_template_file_is_named_once(tiny_model, tmp_path):
    file = tmp_path / "bad.jinja"
    file.write_text("{% if %}")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tiny_model, chat_template_file=file)
    assert str(caught.value).startswith(f"{file}: chat_template: is no valid template")


def test_the_embedded_model_by_another_spelling(monkeypatch, tmp_path):
    def fetched(**_):
        raise ModelError("smollm2", "was asked for")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oneloop.loader.resolve.fetch_embedded", fetched)
    for name in ("smollm2", "SmolLM2", "SMOLLM2"):
        with pytest.raises(ModelError, match="was asked for"):
            resolve_model(name)
    (tmp_path / "SmolLM2").mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model("SmolLM2")
    with pytest.raises(ConfigError, match="--revision"):
        resolve_model("SmolLM2", revision="main")


def test_a_server_that_wants_a_key():
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = b'{"error":"Unauthorized"}'
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        model = RemoteModel(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(
            RequestError, match="Unauthorized; give the server's key with --api-key or ONELOOP_API_KEY"
        ):
            list(model.reply([{"role": "user", "content": "hi"}], SamplingParams()))
        thread.join()


def test_who_gives_no_prompt_at_a_terminal_is_told_that_it_is_awaited(tiny_model):
    main_end, terminal = pty.openpty()
    process = subprocess.Popen(
        [*ONELOOP, "generate", "--model", str(tiny_model), *DUMMY, "--max-tokens", "3"],
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(terminal)
    os.write(main_end, b"abc\n\x04")
    out, error = process.communicate(timeout=60)
    os.close(main_end)
    assert process.returncode == 0
    assert error == "Type the prompt; Ctrl-D on a line of its own ends it.\n"
    assert out
