"""The GPU's runner with keys and values in 8 bits, beside the CPU's runner with the same.

As test_gpu_runner.py, whose sides it drives: in the interpreter, or on a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from oneloop.models.registry import build_model
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.registry import TRITON, prefer

if torch.cuda.is_available() and not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _numpy_is_silent():
    """Rows of padding hold whatever was in memory."""
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.mark.parametrize("scaled", [False, True])
def test_log_probabilities_of_a_prompt_in_chunks(sides, make_spec, core_factory, buffer_factory, scaled):
    """They read what the chunks before have left: near the CPU's, for a key next to a midpoint may be rounded the other
    way, and those of keys in full away from them.
    """
    spec = make_spec(head_dim=64, hidden_size=64)
    if scaled:
        spec = replace(spec, kv_scales=((0.07, 3.0), (1.3, 0.02), *[(1.0, 1.0)] * (spec.num_layers - 2)))
    with prefer(TRITON):
        on_device = sides.fill(build_model(spec, torch.float32, sides.DEVICE))
    on_cpu = sides.fill(build_model(spec, torch.float32, torch.device("cpu")))
    rng = random.Random(6)
    prompts = [[rng.randrange(sides.VOCAB_SIZE) for _ in range(length)] for length in (40, 33)]
    requests = [(prompt, {"max_tokens": 0, "prompt_logprobs": 0}) for prompt in prompts]
    sizes = {"block_size": sides.BLOCK_SIZE, "num_blocks": sides.NUM_BLOCKS, "vocab_size": sides.VOCAB_SIZE}

    def values(make_side):
        core = core_factory(**sizes, hash_key=None, max_num_batched_tokens=24)
        outcome = sides.drive(make_side(core.layout), core, requests, lookahead=True)
        return np.array([entries[0][1] for scores in outcome.of_prompts.values() for _, entries in scores])

    narrow = sides.memory_plan(spec, "fp8")
    cpu = values(lambda layout: sides.CpuSide(on_cpu, narrow, layout, buffer_factory))
    gpu = values(lambda layout: sides.DeviceSide(on_device, narrow, layout, enforce_eager=False))
    full = values(
        lambda layout: sides.DeviceSide(on_device, sides.memory_plan(spec), layout, enforce_eager=False)
    )
    assert len(gpu) == len(cpu) == sum(len(prompt) - 1 for prompt in prompts)
    assert abs(gpu - cpu).max() < 0.1
    assert abs(gpu - cpu).mean() < 0.1 * abs(gpu - full).mean()
