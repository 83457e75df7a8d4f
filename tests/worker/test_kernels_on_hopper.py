"""Every kernel that a step can launch compiles for an H200, in all its branches. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop_kernels.testing.recorded import name_of
from oneloop_kernels.testing.whole import compile_recorded

PROGRAM = Path(__file__).with_name("launches_on_hopper.py")


@pytest.fixture(scope="module")
def jobs():
    """What the launches would compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_in_all_its_branches(jobs):
    """The interpreter, in which kernels are tested where there is no GPU, takes what the compiler does not."""
    outcome = compile_recorded(jobs)
    assert not outcome.failures, "\n\n".join(outcome.failures)
    assert not outcome.unseen, "launches_on_hopper.py has no launch with:\n" + "\n".join(outcome.unseen)


def test_what_does_not_compile_or_has_no_launch_is_told(jobs):
    silu = [json.loads(job) for job in jobs if name_of(job) == "silu_mul_kernel"]
    broken = silu[0] | {"signature": [[name, "i32"] for name, _ in silu[0]["signature"]]}
    outcome = compile_recorded([json.dumps(broken)])
    (failure,) = outcome.failures
    assert failure.startswith("silu_mul_kernel: CompilationError")
    kernels = "oneloop_kernels.ops"
    assert f"{kernels}.rms_norm.triton.rms_norm_kernel: no launch of it is compiled" in outcome.unseen
    assert (
        f"{kernels}.sampling.triton.admit.clear_edits_kernel: no launch of it is compiled" in outcome.unseen
    )
    assert any(f"{kernels}.silu_mul.triton.silu_mul_kernel, line" in entry for entry in outcome.unseen)
