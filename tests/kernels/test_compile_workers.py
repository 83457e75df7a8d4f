"""Kernels compiled in other processes: found under the same key, and nothing of the processes stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import triton.language as tl

from oneloop_kernels.compiling import jobs
from oneloop_kernels.compiling.mark import StartMark
from oneloop_kernels.compiling.workers import CompileWorkers

PROGRAM = Path(__file__).with_name("compile_beside.py")
KEYS = """
from oneloop_kernels.compiling.keys import definite_keys
from oneloop_kernels.ops.sampling.triton.greedy import greedy_kernel
from oneloop_kernels.ops.sampling.triton.scan import scan_kernel
with definite_keys():
    keys = {kernel.__name__: kernel.cache_key for kernel in (%s)}
print(sorted(keys.items()))
"""
ORPHANS = """
import os, signal
from oneloop_kernels.compiling.workers import CompileWorkers
print(CompileWorkers.start(2).process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def environment(tmp_path):
    """Of programs whose kernels are compiled: without Triton's interpreter, with an empty cache."""
    (tmp_path / "temporary").mkdir()
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")}


def output_of(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(group):
    limit = time.monotonic() + 20
    while is_alive(group):
        assert time.monotonic() < limit, "processes are left"
        time.sleep(0.02)


def test_they_are_found_in_the_cache(environment, tmp_path):
    found = json.loads(output_of([sys.executable, str(PROGRAM), "2"], environment))
    assert found == {"rms_norm_kernel": True, "silu_mul_kernel": True, "hashes of Triton": 1}
    assert not list((tmp_path / "temporary").iterdir())


def test_without_workers_they_are_compiled_here(environment):
    """What the test above looks at can be false: here the workers never come."""
    found = json.loads(output_of([sys.executable, str(PROGRAM), "2", "/bin/false"], environment))
    assert found == {"rms_norm_kernel": False, "silu_mul_kernel": False, "hashes of Triton": 1}


def test_keys_do_not_depend_on_the_order(environment):
    orders = ("greedy_kernel, scan_kernel", "scan_kernel, greedy_kernel")
    first, second = (output_of([sys.executable, "-c", KEYS % order], environment) for order in orders)
    assert first == second


def test_close_waits_for_none(monkeypatch, tmp_path):
    """While they still import torch, too; and again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    workers = CompileWorkers.start(2)
    assert is_alive(workers.process.pid)
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 5
    assert not is_alive(workers.process.pid)
    assert not list(tmp_path.iterdir())
    workers.close()
    assert workers.compile("{}") is False


def test_they_end_with_a_process_that_is_killed(environment, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], env=environment, stdout=subprocess.PIPE
    ) as process:
        group = int(process.stdout.readline())
    assert process.returncode == -signal.SIGKILL
    wait_until_gone(group)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_job_that_fails_is_no_end(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    workers = CompileWorkers.start(1)
    try:
        for _ in range(2):
            assert workers.compile('{"kernel": {"kernel": ["os", "system"]}}') is False
        assert not workers._free.get()._failed
    finally:
        workers.close()


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, "bf16", float("-inf"), (16, (1, "x")), [["tt.divisibility", 16]], tl.bfloat16],
    ids=repr,
)
def test_values_come_through_with_their_types(value):
    again = jobs._value(json.loads(json.dumps(jobs._plain(value))))
    assert again == value
    assert type(again) is type(value)
    assert str(again) == str(value)


@pytest.mark.parametrize("value", [object(), {1: 2}, b"x"], ids=repr)
def test_other_values_are_not_sent(value):
    with pytest.raises(TypeError, match="no form in JSON"):
        jobs._plain(value)


def test_no_module_of_others_is_imported():
    with pytest.raises(ValueError, match="os is no module of oneloop_kernels"):
        jobs._value({"kernel": ["os", "system"]})


def test_mark(tmp_path):
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    mark = StartMark("H200", 256, environment=environment)
    assert not mark.exists()
    mark.write()
    assert StartMark("H200", 256, environment=environment).exists()
    assert not StartMark("H200", 128, environment=environment).exists()
    other = {"TRITON_HOME": str(tmp_path)}
    assert StartMark("H200", 256, environment=other).path.parent == tmp_path / ".triton" / "cache"


def test_a_mark_that_cannot_be_written_is_none(tmp_path):
    (tmp_path / "cache").write_text("a file")
    mark = StartMark(environment={"TRITON_CACHE_DIR": str(tmp_path / "cache")})
    mark.write()
    assert not mark.exists()
