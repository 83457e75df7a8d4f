"""The GPU's runner with a mixture of experts: its texts and the tokens that experts get are those of the CPU's.

As test_gpu_runner.py, whose sides it drives: in the interpreter, or on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from oneloop.formats.model_spec import MoeSpec
from oneloop.models.registry import build_model
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.registry import TRITON, prefer

EXPERTS = MoeSpec(
    num_experts=6, top_k=2, intermediate_size=32, renormalised=True, sparse_step=2, layout="qwen"
)
if torch.cuda.is_available() and not INTERPRETED:
    pytestmark = pytest.mark.gpu


def test_a_dense_and_a_sparse_layer(sides, make_spec, core_factory, buffer_factory):
    """Steps have rows of padding, of which no expert hears: the counts of tokens are equal too."""
    spec = make_spec(head_dim=64, hidden_size=64, architecture="Qwen3MoeForCausalLM", moe=EXPERTS)
    with prefer(TRITON):
        on_device = sides.fill(build_model(spec, torch.float32, sides.DEVICE))
    models = sides.fill(build_model(spec, torch.float32, torch.device("cpu"))), on_device
    plan = sides.memory_plan(spec)
    counts = [model.count_experts() for model in models]
    requests = sides.some_requests(5, 11, sides.LONGEST, **sides.GREEDY)
    sizes = {"block_size": sides.BLOCK_SIZE, "num_blocks": sides.NUM_BLOCKS, "vocab_size": sides.VOCAB_SIZE}

    def drive(make_side):
        core = core_factory(**sizes, hash_key=None)
        return sides.drive(make_side(core.layout), core, requests, lookahead=True)

    cpu = drive(lambda layout: sides.CpuSide(models[0], plan, layout, buffer_factory))
    gpu = drive(lambda layout: sides.DeviceSide(models[1], plan, layout, enforce_eager=False))
    assert gpu.texts == cpu.texts
    assert [list(counted) for counted in counts] == [[1], [1]]
    assert torch.equal(counts[0][1], counts[1][1].cpu())
