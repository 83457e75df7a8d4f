"""Weights read by several threads in small pieces: the same as by one, whatever the targets' strides."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from oneloop.errors import ModelError
from oneloop.formats.expected import expected_tensors, stored_tensors
from oneloop.formats.safetensors import read_safetensors
from oneloop.loader.arrivals import Arrivals
from oneloop.loader.checkpoint import read_checkpoint
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.gguf import load_gguf_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.parallel import in_threads
from oneloop.loader.resolve import resolve_model
from oneloop.loader.staging import Staging, loading_threads
from oneloop.quant.base import Incoming

CPU = torch.device("cpu")


def transposed_targets(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices stored [in, out], as views of their checkpoint's shape; full of NaN."""
    return {
        name: torch.full(shape[::-1], torch.nan, dtype=dtype).t()
        if len(shape) == 2
        else torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_any_threads_pieces_and_strides(
    checkpoint: Any, num_threads: int, chunk_bytes: int, dtype: torch.dtype
) -> None:
    _, folder = checkpoint(max_shard_size="60KB")
    spec = resolve_model(str(folder)).spec
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= safetensors.torch.load_file(path)
    targets = transposed_targets(expected_tensors(spec), dtype)
    seen: list[tuple[int, int]] = []
    load_hf_weights(
        read_checkpoint(folder, stored_tensors(spec)),
        targets,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes,
        progress=lambda _what, done, total: seen.append((done, total)),
    )
    for name, target in targets.items():
        assert torch.equal(target, stored[name].to(dtype)), name
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] == sum(tensor.nbytes for tensor in stored.values())


def test_gguf_in_threads_into_transposed_targets() -> None:
    """The embedded model: two layers of it, rotary rows and quantised blocks included."""
    source = resolve_model("smollm2")
    assert source.gguf is not None
    shapes = {
        name: shape
        for name, shape in expected_tensors(source.spec).items()
        if "layers.0." in name or "layers.29." in name
    }
    plain = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    load_gguf_weights(source.gguf, source.spec, plain)
    for dtype in (torch.float32, torch.bfloat16):
        targets = transposed_targets(shapes, dtype)
        load_gguf_weights(source.gguf, source.spec, targets, num_threads=3)
        for name, target in targets.items():
            assert torch.equal(target, plain[name].to(dtype)), name


def test_a_file_that_shrinks_is_named(checkpoint: Any) -> None:
    _, folder = checkpoint()
    spec = resolve_model(str(folder)).spec
    tensors = read_checkpoint(folder, stored_tensors(spec))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="became shorter while it was read"):
        load_hf_weights(tensors, transposed_targets(expected_tensors(spec), torch.float32), num_threads=4)


def test_every_item_goes_to_one_thread_and_errors_end_all() -> None:
    taken: list[tuple[int, str]] = []

    def collect(items: Any) -> None:
        taken.extend((item, threading.current_thread().name) for item in items)

    in_threads(collect, range(1000), 4)
    assert sorted(item for item, _ in taken) == list(range(1000))
    in_threads(collect, range(5), 1)
    assert {name for _, name in taken[1000:]} == {threading.current_thread().name}

    entered = threading.Barrier(2)
    rest = iter(range(1_000_000))

    def fail(items: Any) -> None:
        for item in items:
            if item < 2:
                entered.wait(10)
            if item == 1:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_threads(fail, rest, 2)
    assert next(rest) < 999_999


def test_staging_hands_out_what_was_asked_for() -> None:
    with Staging(CPU, chunk_bytes=16) as staging:
        for size in (4, 16, 64):
            raw = staging.buffer(size)
            assert raw.shape == (size,)
            raw.view(torch.float32).fill_(size)
            target = torch.empty(size // 4, dtype=torch.float16)
            staging.copy(raw.view(torch.float32), target)
            assert target.eq(size).all()
    assert loading_threads(CPU) == 1
    assert 1 <= loading_threads(torch.device("cuda")) <= 8


def test_dummy_weights_of_transposed_targets_are_the_same_every_time() -> None:
    shapes = {"a": (32, 48), "b": (64,)}
    first, again = (transposed_targets(shapes, torch.bfloat16) for _ in range(2))
    for targets in (first, again):
        fill_dummy_weights(targets, seed=3)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert 4e-4 < weight.float().std() < 8e-4


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_headers_are_checked_without_torch(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    """A missing tensor ends the start before torch is imported, which takes seconds."""
    if kind == "safetensors":
        _, path = checkpoint()
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        del tensors["model.norm.weight"]
        safetensors.torch.save_file(tensors, path / "model.safetensors")
        missing = "model.norm.weight"
    else:
        data = resolve_model("smollm2").path.read_bytes()
        path = tmp_path / "m.gguf"
        path.write_bytes(data.replace(b"output_norm.weight", b"output_norn.weight", 1))
        missing = "output_norm.weight"
    code = (
        "import sys\n"
        "from oneloop.config import EngineConfig\n"
        "from oneloop.errors import ModelError\n"
        "from oneloop.executor.select import create_executor\n"
        "from oneloop.start_times import StartTimes\n"
        f"config = EngineConfig.from_flat({{'model': {str(path)!r}, 'device': 'cpu'}})\n"
        "executor = create_executor(config, StartTimes())\n"
        "try:\n"
        "    executor.locate()\n"
        "except ModelError as error:\n"
        "    print(error.item, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [missing, "False"]


def test_copies_are_told_when_what_is_handed_over_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its memory may still be in use; parameters are older than the buffers, which know of that themselves."""
    values = torch.arange(6.0)
    stored = {"handed over": values, "parameter": values.clone()}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    told: list[object] = []
    taken: list[torch.Tensor] = []
    copy = Staging.copy

    def expect(self: Arrivals, incoming: Incoming, shape: tuple[int, ...]) -> Any:
        arrival = made(self, incoming, shape)
        arrival.ready = "ready"
        return arrival

    def watched(self: Staging, values: torch.Tensor, target: torch.Tensor, ready: Any = None) -> Any:
        told.append(ready)
        return copy(self, values, target)

    made = Arrivals.expect
    monkeypatch.setattr(Arrivals, "expect", expect)
    monkeypatch.setattr(Staging, "copy", watched)
    parameter = torch.empty(6, dtype=torch.float64)
    incoming = Incoming((6,), torch.float64, CPU, taken.append)
    tensors = read_safetensors(tmp_path / "model.safetensors")
    load_hf_weights(tensors, {"handed over": incoming, "parameter": parameter}, chunk_bytes=8)
    assert told == ["ready"] * 3 + [None] * 3
    assert torch.equal(taken[0], values.double())
    assert torch.equal(parameter, values.double())
