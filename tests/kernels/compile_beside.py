"""Run as a program by test_compile_workers.py: kernels compile in workers, with a driver that only says "sm_90".

Prints a JSON object: each kernel with whether Triton found it in its cache when this process asked for it; and how
often this process made a hash of Triton itself.
"""

from __future__ import annotations

import json
import sys

import torch
from triton import knobs
from triton.runtime.cache import triton_key

from oneloop_kernels.compiling.workers import CompileWorkers
from oneloop_kernels.launch import compiling_ahead
from oneloop_kernels.ops.rms_norm.triton import rms_norm
from oneloop_kernels.ops.silu_mul.triton import silu_mul
from oneloop_kernels.testing.recorded import use_hopper_driver


def main() -> None:
    python, sys.executable = sys.executable, (sys.argv[2] if len(sys.argv) > 2 else sys.executable)
    workers = CompileWorkers.start(int(sys.argv[1]))
    sys.executable = python
    assert workers is not None
    use_hopper_driver()
    found: dict[str, bool] = {}

    def listen(*, src, cache_hit, **_rest):
        found[src.name] = cache_hit

    knobs.compilation.listener = listen
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    with compiling_ahead(1, workers):
        rms_norm(x, x[0], 1e-6)
        silu_mul(x)
    workers.close()
    print(json.dumps(found | {"hashes of Triton": triton_key.cache_info().misses}))


if __name__ == "__main__":
    main()
