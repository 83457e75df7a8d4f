"""Weights on a GPU: what pinned buffers, streams and threads put there is what a CPU load gives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from oneloop.formats.expected import expected_tensors, stored_tensors
from oneloop.loader.checkpoint import read_checkpoint
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.loader.staging import loading_threads
from oneloop.models.decoder import Decoder
from oneloop.quant.fp8 import Fp8Weight
from oneloop.worker.memory.sizes import weight_bytes

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
MIB = 1 << 20


def poisoned(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, *, transposed: bool
) -> dict[str, torch.Tensor]:
    """Targets full of NaN; matrices stored [in, out] where transposed."""
    targets = {}
    for name, shape in shapes.items():
        stored = shape[::-1] if transposed else shape
        target = torch.full(stored, torch.nan, dtype=dtype, device=GPU)
        targets[name] = target.t() if transposed and len(shape) == 2 else target
    return targets


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_safetensors(
    kit: Any, checkpoint: Any, dtype: torch.dtype, transposed: bool, chunk_bytes: int
) -> None:
    _, folder = checkpoint(dtype=torch.bfloat16, max_shard_size="60KB")
    spec = resolve_model(str(folder)).spec
    targets = poisoned(expected_tensors(spec), dtype, transposed=transposed)
    tensors = read_checkpoint(folder, stored_tensors(spec))
    load_hf_weights(tensors, targets, num_threads=8, chunk_bytes=chunk_bytes)
    for name, expected in kit.load(folder, dtype).weight_targets().items():
        assert torch.equal(targets[name].cpu(), expected), name


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gguf(kit: Any, dtype: torch.dtype, transposed: bool) -> None:
    source = resolve_model("smollm2")
    assert source.gguf is not None
    targets = poisoned(expected_tensors(source.spec), dtype, transposed=transposed)
    load_gguf_weights(source.gguf, source.spec, targets, num_threads=loading_threads(GPU))
    for name, expected in kit.load("smollm2", dtype).weight_targets().items():
        assert torch.equal(targets[name].cpu(), expected), name


def test_a_load_leaves_no_memory_behind() -> None:
    source = resolve_model("smollm2")
    before = torch.cuda.memory_reserved(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    model = load_model(source, dtype=torch.bfloat16, device=GPU)
    assert model.dtype == torch.bfloat16
    weights = weight_bytes(source.spec, 2, on_gpu=True)
    assert torch.cuda.memory_reserved(GPU) - before < weights + 64 * MIB
    assert torch.cuda.max_memory_reserved(GPU) - before < weights + 320 * MIB


def test_dummy_weights_are_fast_and_the_same_every_time() -> None:
    """At the rate that fills 16 GB in 0.3 s."""
    shapes = {f"layer.{index}": (14_336, 4096) for index in range(16)}
    first, again, other = (poisoned(shapes, torch.bfloat16, transposed=False) for _ in range(3))
    fill_dummy_weights(first, seed=1)
    torch.cuda.synchronize(GPU)
    begin = time.perf_counter()
    fill_dummy_weights(again, seed=1)
    torch.cuda.synchronize(GPU)
    took = time.perf_counter() - begin
    fill_dummy_weights(other, seed=2)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])
        assert weight.abs().max() <= 1e-3
    assert sum(weight.nbytes for weight in again.values()) / took > 16e9 / 0.3


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_quantising_needs_memory_for_a_few_tensors(way: str) -> None:
    """By several threads: the same weights as on a CPU, to a rounding here and there."""
    source = resolve_model("smollm2", quantization=way)  # type: ignore[arg-type]
    before = torch.cuda.memory_reserved(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    model = load_model(source, dtype=torch.bfloat16, device=GPU)
    weights = weight_bytes(source.spec, 2, on_gpu=True)
    assert torch.cuda.memory_reserved(GPU) - before < weights + 64 * MIB
    assert torch.cuda.max_memory_reserved(GPU) - before < weights + 320 * MIB
    on_cpu = load_model(source, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    assert isinstance(on_cpu, Decoder)
    for ours, theirs in zip(model.layers, on_cpu.layers, strict=True):
        found, wanted = ours.attention.qkv.stored, theirs.attention.qkv.stored
        assert isinstance(found, Fp8Weight)
        assert isinstance(wanted, Fp8Weight)
        torch.testing.assert_close(found.scales.cpu(), wanted.scales)
        torch.testing.assert_close(found.matrix.cpu().float(), wanted.matrix.float(), rtol=0.13, atol=0.002)
