"""`oneloop generate` as a person uses it: a terminal, a pipe, Ctrl-C."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]


@pytest.fixture
def command(tiny_model):
    options = ["--model", str(tiny_model), "--load-format", "dummy", "--num-gpu-blocks-override", "64"]
    return [*ONELOOP, "generate", *options, "--max-num-seqs", "4", "--temperature", "0"]


def test_prompt_from_the_command_line_and_from_a_pipe(command):
    given = subprocess.run(
        [*command, "--max-tokens", "8", "hello"], capture_output=True, timeout=60, check=True
    )
    piped = subprocess.run(
        [*command, "--max-tokens", "8"], input=b"hello", capture_output=True, timeout=60, check=True
    )
    assert given.stdout == piped.stdout
    assert given.stdout.endswith(b"\n")
    assert len(given.stdout) > 1
    assert given.stderr == b""


def test_an_impossible_request_is_one_line(command):
    done = subprocess.run([*command, "--top-p", "7", "x"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "oneloop: error: top_p must be in 0 … 1, got 7.0\n"


def test_a_reader_that_leaves_ends_it(command):
    """`oneloop generate … | head -c1`"""
    process = subprocess.Popen(
        [*command, "--max-tokens", "400", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
    )
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(20) == 1
    process.stderr.close()
    assert b"Traceback" not in errors


@pytest.mark.parametrize("after_text", [True, False], ids=["while-generating", "while-loading"])
def test_ctrl_c_in_a_terminal(command, after_text):
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "--max-tokens", "500", "x"], stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([main], [], [], 0.05)[0]:
            seen += os.read(main, 4096)
        text = re.sub(rb"\x1b\[[0-9;]*[A-Za-z]|[^\r\n]*\|[^\r\n]*", b"", seen).strip()
        if text if after_text else seen:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    while select.select([main], [], [], 0.2)[0]:
        try:
            seen += os.read(main, 4096)
        except OSError:
            break
    os.close(main)
    assert b"Traceback" not in seen


def test_the_embedded_model_without_any_option():
    """The real chat model, as `make model` fetched it."""
    done = subprocess.run(
        [*ONELOOP, "generate", "The capital of France is", "--temperature", "0", "--max-tokens", "3"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(" Paris")
