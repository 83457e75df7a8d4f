"""`oneloop serve --record-trace`, then `oneloop replay`: as processes, without torch."""

import signal
import struct
import subprocess
import sys
import time
import zlib

import pytest

from oneloop.cli.main import main

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]
BODY = {"model": "tiny", "prompt": "go on", "max_tokens": 40, "ignore_eos": True, "n": 2}


@pytest.fixture
def trace(serving, tmp_path):
    """A trace of a served request, and the server's log."""
    path = tmp_path / "trace"
    options = ["--served-model-name", "tiny", "--executor", "null", "--record-trace", str(path)]
    with serving(*options) as server:
        server.wait_for_status(200)
        assert server.request("POST", "/v1/completions", BODY)[0] == 200
        code, errors = server.end(signal.SIGTERM)
    assert code == 0
    return path, errors


def test_a_served_run_is_replayed(trace, capsys):
    path, errors = trace
    assert f"recording the schedule to {path}" in errors
    assert f"the schedule trace {path} is complete: " in errors
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("40 steps, ")
    assert shown[1] == "identical (the engine was shut down)"
    assert main(["replay", str(path), "--until", "3", "--print"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["nothing to run", "submit 1: 5 prompt tokens, up to 40 more, n = 2"]
    assert shown[-2].startswith("3 steps, ")
    assert shown[-1] == "identical so far (there may be more steps)"
    assert main(["replay", str(path), "--until", "1000"]) == 0
    assert capsys.readouterr().out.endswith("identical (the engine was shut down)\n")


@pytest.mark.parametrize("until", ["0", "-1", "x", "²"])
def test_steps_that_cannot_be(until):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "trace", "--until", until])
    assert ended.value.code == 2


def test_a_terminal_does_not_obey_a_trace(trace, capsys):
    """The release is text of whoever wrote the file."""
    path, _ = trace
    content = path.read_bytes()
    length, _ = struct.unpack_from("<II", content, 12)
    head = content[20 : 20 + length]
    evil = b"\x05\x1b[31m" + head[1 + head[0] :]
    frame = struct.pack("<II", len(evil), zlib.crc32(evil)) + evil
    path.write_bytes(content[:12] + frame + content[20 + length :])
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "recorded by oneloop \\x1b[31m\n" in shown


def test_exit_codes(trace, tmp_path, capsys):
    path, _ = trace
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    assert main(["replay", str(path)]) == 1
    assert "UNREADABLE beyond that: the trace is cut off at byte" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "none: No such file or directory" in capsys.readouterr().err


def test_replay_imports_no_torch(trace):
    path, _ = trace
    code = (
        "import sys\nfrom oneloop.cli.main import main\n"
        f"code = main(['replay', {str(path)!r}])\n"
        "print({'torch', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules), code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "set() 0", result.stderr


def test_a_killed_server_leaves_a_sound_trace(serving, tmp_path, capsys):
    path = tmp_path / "trace"
    options = ["--served-model-name", "tiny", "--executor", "null", "--record-trace", str(path)]
    with serving(*options) as server:
        server.wait_for_status(200)
        assert server.request("POST", "/v1/completions", BODY)[0] == 200
        time.sleep(0.3)  # the writer gathers for 50 ms
        server.process.kill()
    assert main(["replay", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "40 steps, " in shown
    assert "no end mark" in shown
