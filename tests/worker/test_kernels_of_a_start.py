"""All kernels are compiled at the start: one that a step had to compile would hold up every stream for a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("start_without_gpu.py")


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("dense", (256, 32, 256)),
        ("dense", (32000, 200, 2048)),
        ("sparse", (256, 100, 3072)),
        ("sparse, 8 bits", (256, 100, 3072)),
    ],
    ids=["small", "larger", "experts", "experts of 8 bits"],
)
def test_no_step_compiles(model, sizes):
    """sizes: of the vocabulary, the batch and the step."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), model, *map(str, sizes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"greedy_kernel", "finish_kernel", "decode_kernel", "tiles_kernel"} <= set(found["at_start"])
    assert not found["late"]
