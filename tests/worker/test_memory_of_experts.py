"""The memory plan of sparse layers, and of weights of 8 bits on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from oneloop.config import EngineConfig
from oneloop.formats.model_spec import MoeSpec
from oneloop.formats.quantization.config import WHILE_LOADING
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.worker.memory import sizes
from oneloop.worker.memory.cpu import activation_bytes as cpu_activation_bytes
from oneloop.worker.memory.gpu import activation_bytes, sparse_bytes
from oneloop_kernels.ops.moe import weights

CPU = torch.device("cpu")
MIB = 1 << 20
EXPERTS = MoeSpec(num_experts=128, top_k=8, intermediate_size=768, renormalised=True, layout="qwen")


@pytest.mark.parametrize("num_tokens", [1, 64, 2048, 8192])
@pytest.mark.parametrize("hidden_size", [2048, 512])
@pytest.mark.parametrize("kind", ["plain", "8 bits", "4 bits"])
def test_experts_allocate_what_is_planned(monkeypatch, num_tokens, hidden_size, kind):
    """By every kind of kernel. What a large step makes beside the activations is small."""
    from oneloop_kernels.ops.fp8_linear.triton import quantize
    from oneloop_kernels.ops.linear import Norm
    from oneloop_kernels.ops.moe import Experts, MoeCall, gpu, num_counters
    from oneloop_kernels.ops.moe.packed_stack import PackedStack
    from oneloop_kernels.ops.moe.weights import Fp8Stack

    class Nothing:
        def __getitem__(self, _grid):
            return lambda *_arguments, **_constants: None

    monkeypatch.setattr(gpu, "route_kernel", Nothing())
    monkeypatch.setattr(quantize, "quantize_kernel", Nothing())

    def tensor(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    quantized = kind == "8 bits"
    count, width = EXPERTS.num_experts, EXPERTS.intermediate_size

    def weight(rows, columns):
        if kind == "4 bits":
            halves, device = 1 + (rows == 2 * width), torch.device("meta")
            form = {"bits": 4, "shift": "offset", "group_size": 32, "ordered": False}
            return PackedStack.empty(
                count, rows, columns, halves=halves, **form, dtype=torch.bfloat16, device=device
            )
        if not quantized:
            return tensor(count, rows, columns)
        scales = tensor(count, rows // 128, columns // 128, dtype=torch.float32)
        return Fp8Stack(tensor(count, rows, columns, dtype=torch.float8_e4m3fn), scales)

    gate_up, down = weight(2 * width, hidden_size), weight(hidden_size, width)
    experts = Experts(tensor(count, hidden_size), gate_up, down, 8, True)
    counters = tensor(num_counters(count), dtype=torch.int32)
    call = MoeCall(tensor(num_tokens, hidden_size), experts, Norm(tensor(hidden_size), 1e-6), counters)
    plan = gpu.plan_for(CPU, torch.bfloat16, num_tokens, gpu.shape_of(call))
    routed = gpu.route(call, plan)
    inner = gpu.gate_up(call, plan, routed).out
    last = gpu.down(call, plan, routed, inner)
    parts = (*(part for part in routed if isinstance(part, torch.Tensor)), inner, last.out)
    if quantized and not plan.down.quantizes:
        parts += last.arguments[:2]
    storages = {id(part.untyped_storage()): part.untyped_storage().nbytes() for part in parts}
    allocated, planned = (
        sum(storages.values()),
        num_tokens * sparse_bytes(EXPERTS, hidden_size, 2, quantized=quantized),
    )
    assert allocated <= planned + 3 * MIB  # shares of logits, of which a small step has several
    if num_tokens > 512:
        assert planned < 1.1 * allocated


def test_experts_of_8_bits_are_widened_in_parts(make_spec):
    """So a CPU needs no memory for all of them."""
    scheme = QuantizationSpec(method="fp8", scheme=WHILE_LOADING["fp8"])
    wide = replace(
        make_spec(hidden_size=4096), quantization=scheme, moe=replace(EXPERTS, intermediate_size=14336)
    )
    assert sizes.WIDENED_AT_ONCE == weights.WIDENED_AT_ONCE
    assert sizes.widened_bytes(wide) == 4 * sizes.WIDENED_AT_ONCE


def test_experts_count_as_activations_where_they_are_wider(make_spec):
    dense = make_spec(hidden_size=2048, intermediate_size=6144)
    sparse = replace(dense, moe=EXPERTS)
    more = activation_bytes(sparse, 2, 1000) - activation_bytes(dense, 2, 1000)
    assert more == 1000 * (sparse_bytes(EXPERTS, 2048, 2) - 2 * (3 * 6144 + 2048))
    config = EngineConfig.from_flat({"device": "cpu", "max_num_batched_tokens": 512, "max_model_len": 64})
    spec = make_spec()
    wider = replace(spec, moe=replace(EXPERTS, intermediate_size=4096))
    assert cpu_activation_bytes(wider, 4, config) > cpu_activation_bytes(spec, 4, config)
    assert cpu_activation_bytes(wider, 4, config) >= 4 * 512 * 4 * 4096


MEASURED = """
import sys
from pathlib import Path

import torch

from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear.reference import linear
from oneloop_kernels.ops.linear import LinearCall

def kibibytes(item):
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(item)).split()[1])

weight = torch.zeros(2 * 4096, 1024, dtype=FP8)
scales = torch.ones((64, 8) if sys.argv[1] == "block" else 8192)
call = LinearCall(torch.zeros(1, 1024), weight)
linear(call, scales)  # so that nothing is made for the first time
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
before = kibibytes("VmRSS")
linear(call, scales)
print((kibibytes("VmHWM") - before) * 1024)
"""
"""In a process of its own: what others have given back hides what is taken."""


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_weights_of_8_bits_are_widened_in_the_memory_that_is_planned(make_spec, way):
    """On a CPU, one map at a time."""
    config = EngineConfig.from_flat({"device": "cpu", "max_num_batched_tokens": 512, "max_model_len": 64})
    spec = replace(make_spec(), hidden_size=1024, intermediate_size=4096)
    eight_bits = replace(spec, quantization=QuantizationSpec(method="fp8", scheme=WHILE_LOADING[way]))
    planned = cpu_activation_bytes(eight_bits, 4, config) - cpu_activation_bytes(spec, 4, config)
    assert planned == 4 * 2 * 4096 * 1024
    measure = [sys.executable, "-c", MEASURED, way.removeprefix("fp8-")]
    done = subprocess.run(measure, capture_output=True, text=True, check=True, timeout=60)
    assert 0.9 * planned <= int(done.stdout) <= planned + 2 * MIB
