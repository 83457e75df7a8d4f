"""What a command costs and says before any model is loaded."""

import socket
import subprocess
import sys
import time

import pytest

ONELOOP = [sys.executable, "-m", "oneloop.cli.main"]


def run(*arguments, **more):
    return subprocess.run([*ONELOOP, *arguments], capture_output=True, text=True, timeout=60, **more)


def test_help_is_fast():
    """Best of five: the limit is about our imports, not about what else this machine does."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        done = run("--help")
        times.append(time.perf_counter() - begin)
        assert done.returncode == 0
        assert "serve" in done.stdout
    assert min(times) < 0.3


@pytest.mark.parametrize("module", ["oneloop", "oneloop.cli.main", "oneloop.config"])
def test_light_modules_import_nothing_heavy(module):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "aiohttp", "transformers", "numpy", "tokenizers", "oneloop_core", "asyncio"}
    assert heavy.isdisjoint(done.stdout.split())


def test_the_engine_imports_no_torch():
    code = "import sys, oneloop.engine.offline, oneloop.executor.cpu; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert {"torch", "transformers", "aiohttp"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["serve", "--nonsense"], ["serve", "--dtype", "int3"]]
)
def test_usage_errors_exit_2(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_a_port_in_use_fails_before_the_model_is_touched():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        begin = time.perf_counter()
        done = run("serve", "/no/such/model", "--port", str(port))
        took = time.perf_counter() - begin
    assert done.returncode == 1
    assert (
        f"port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert took < 2


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "hi", "--model"], ["chat"]])
def test_a_missing_model_is_one_line(command):
    done = run(*command, "/no/such/model", input="hi\n")
    assert done.returncode == 1
    assert "oneloop: error: /no/such/model: " in done.stderr
    assert "Traceback" not in done.stderr
