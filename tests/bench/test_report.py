"""What is in the way of a bench is one line, not a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kernels.norm"], "kernels need an NVIDIA GPU"),
        (["kernels.table", "--smoke"], "kernels need an NVIDIA GPU"),
        (["h200", "--merge", "/nope"], "/nope: no such file"),
        (["page", "/nope"], "/nope: no such file"),
        (["h200"], "ONELOOP_ANCHORS must name"),
        (["ledger", "model"], "needs an NVIDIA GPU"),
        (["gpu_step", "model"], "no NVIDIA GPU"),
    ],
)
def test_one_line_and_status_2(arguments, says):
    module, *options = arguments
    environment = {name: value for name, value in os.environ.items() if name != "ONELOOP_ANCHORS"}
    done = subprocess.run(
        [sys.executable, "-m", f"oneloop_bench.{module}", *options],
        capture_output=True, text=True, timeout=60, env={**environment, **NO_GPU},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"{module.rsplit('.', 1)[-1]}: error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
