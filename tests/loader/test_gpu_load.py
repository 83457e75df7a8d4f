"""Weights on a GPU: what pinned buffers, streams and threads put there is what a CPU load gives."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oneloop.formats.expected import expected_tensors, stored_tensors
from oneloop.loader.arrivals import Arrivals
from oneloop.loader.checkpoint import read_checkpoint
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.loader.staging import Staging, loading_threads
from oneloop.models.decoder import Decoder
from oneloop.models.registry import build_model
from oneloop.quant.base import Incoming
from oneloop.quant.fp8 import Fp8Weight
from oneloop.quant.gguf import GgufWeight
from oneloop.worker.memory.sizes import weight_bytes
from oneloop_kernels.ops.packed_linear import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.models.base import Model
    from oneloop.quant.base import Target

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
MIB = 1 << 20
PAUSE = 4_000_000
"""Clock ticks of the GPU: some 2 ms."""


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


def leave_work_behind(num_bytes: int) -> int:
    """Let go of so much memory, into which the device still has to write; returns where it is."""
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=GPU)
    torch.cuda.synchronize(GPU)
    torch.cuda._sleep(50 * PAUSE)
    memory.fill_(255)
    return memory.data_ptr()


@pytest.mark.parametrize("taken", [True, False], ids=["handed over", "a parameter"])
def test_copies_wait_for_those_who_had_the_memory(taken: bool) -> None:
    """The allocator hands out memory that is still to be written by what was launched before, on another stream."""
    found: list[torch.Tensor] = []
    torch.cuda.empty_cache()
    early = Staging(GPU, MIB)  # made before there was anything to wait for
    place = leave_work_behind(MIB)
    if taken:
        incoming = Incoming((MIB,), torch.uint8, GPU, lambda values: found.append(values.clone()))
        arrival = Arrivals().expect(incoming, incoming.shape)
        target, ready, staging = arrival.values, arrival.ready, early
    else:
        target, ready, staging = torch.empty(MIB, dtype=torch.uint8, device=GPU), None, Staging(GPU, MIB)
    assert target.data_ptr() == place, "the allocator has found other memory: this tests nothing"
    with early, staging:
        copied = staging.copy(staging.buffer(MIB).fill_(7), target, ready)
        if taken:
            arrival.add(MIB, copied)
        else:
            found.append(target)
    torch.cuda.synchronize(GPU)
    assert bool((found[0] == 7).all())


def slowed(target: Target) -> Target:
    """As the target, but for a device that lags behind the host wherever a tensor is taken."""
    if not isinstance(target, Incoming):
        return target
    take = target.take

    def slow(values: torch.Tensor) -> None:
        torch.cuda._sleep(PAUSE)
        take(values)

    return replace(target, take=slow)


def kept_tensors(model: Model) -> list[torch.Tensor]:
    """All that the layers' maps keep."""
    tensors: list[torch.Tensor] = []
    assert isinstance(model, Decoder)
    for layer in model.layers:
        assert layer.mlp is not None
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
            stored = linear.stored
            if isinstance(stored, Fp8Weight):
                tensors += [stored.matrix.view(torch.uint8), stored.scales]
                continue
            assert isinstance(stored, GgufWeight)
            for piece in stored.kept._pieces:
                assert isinstance(piece.weight, PackedWeight)
                tensors += [piece.weight.words, piece.weight.params]
    return tensors


@pytest.mark.parametrize("way", [None, "fp8", "fp8-block"], ids=["packed", "fp8", "fp8-block"])
def test_a_device_that_lags_behind_gets_the_same_weights(way: Any) -> None:
    """As where several processes share it. Threads take turns in what others have let go of; and again in a second
    model of the process, whose memory is the first one's."""
    source = resolve_model("smollm2", quantization=way)
    assert source.gguf is not None

    def load(num_threads: int, change: Callable[[Target], Target]) -> list[torch.Tensor]:
        model = build_model(source.spec, dtype=torch.bfloat16, device=GPU)
        targets = {name: change(target) for name, target in model.weight_targets().items()}
        assert source.gguf is not None
        load_gguf_weights(source.gguf, source.spec, targets, num_threads=num_threads)
        torch.cuda.synchronize(GPU)
        return kept_tensors(model)

    wanted = [tensor.cpu() for tensor in load(1, lambda target: target)]
    for _ in range(2):
        found = load(8, slowed)
        assert len(found) == len(wanted)
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, wanted, strict=True))
