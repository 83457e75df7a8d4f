"""Scales of keys and values that checkpoints bring along: found by any name, and used where 8 bits are kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "engines": ("attn.k_scale", "attn.v_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "older": ("k_proj.output_scale", "v_proj.output_scale"),
    "one for both": ("kv_scale", "kv_scale"),
}


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    all_tensors = safetensors.torch.load_file(path) | tensors
    safetensors.torch.save_file(all_tensors, path, metadata={"format": "pt"})


def scale(layer: int, name: str, value: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.self_attn.{name}": torch.tensor(value, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES.keys())
def test_they_are_found(
    kit: Any, checkpoint: Any, caplog: Any, names: tuple[str, str], shape: Any, dtype: Any
) -> None:
    """In one layer of two; the other has none."""
    _, folder = checkpoint()
    tensors = scale(1, names[0], 0.125, dtype) | scale(1, names[1], 0.75, dtype)
    add(folder, {name: tensor.view(shape) for name, tensor in tensors.items()})
    with caplog.at_level(logging.WARNING, "oneloop"):
        spec = kit.load(folder).spec
    keys = 0.75 if names[0] == names[1] else 0.125
    assert spec.kv_scales == ((1.0, 1.0), (keys, 0.75))
    assert caplog.records == []


def test_there_need_not_be_any(kit: Any, checkpoint: Any) -> None:
    _, folder = checkpoint()
    assert kit.load(folder).spec.kv_scales == ()
    add(folder, scale(0, "k_scale", 0.5) | scale(0, "v_scale", 0.5))
    assert kit.load(folder, load_format="dummy").spec.kv_scales == ()


@pytest.mark.parametrize(
    "tensors",
    [scale(0, "k_scale", 0.5), scale(0, "k_scale", [0.5, 0.25]) | scale(0, "v_scale", [0.5, 0.25])],
    ids=["alone", "per head"],
)
def test_what_is_not_used_is_told(kit: Any, checkpoint: Any, caplog: Any, tensors: Any) -> None:
    _, folder = checkpoint()
    add(folder, tensors)
    with caplog.at_level(logging.WARNING, "oneloop"):
        assert kit.load(folder).spec.kv_scales == ()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{len(tensors)} scales of keys or values are not used")
    assert "model.layers.0.self_attn.k_scale" in record.getMessage()


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_a_scale_is_a_positive_number(kit: Any, checkpoint: Any, caplog: Any, value: float) -> None:
    """Not so small or large that what is divided by it is nothing but the ends of 8 bits. The layer has none then."""
    _, folder = checkpoint()
    add(folder, scale(0, "k_scale", 0.5) | scale(0, "v_scale", 0.25))
    add(folder, scale(1, "k_scale", 1.0) | scale(1, "v_scale", value))
    with caplog.at_level(logging.WARNING, "oneloop"):
        assert kit.load(folder).spec.kv_scales == ((0.5, 0.25), (1.0, 1.0))
    assert "2 scales of keys or values are not used" in caplog.text


def test_they_are_used_where_8_bits_are_kept(kit: Any, checkpoint: Any) -> None:
    """Powers of two: as if the maps themselves had them, to the last bit."""
    _, folder = checkpoint()
    plain = kit.load(folder)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    keys, values = 2.0**-9, 2.0**7  # so small and so large that unscaled numbers are kept otherwise
    moved = {}
    for layer, (k, v) in enumerate(((keys, values), (values, keys))):
        factors = {"q_proj": k, "k_proj": 1 / k, "v_proj": 1 / v, "o_proj": v}
        for part, factor in factors.items():
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            moved[name] = weights[name] * factor
        add(folder, scale(layer, "k_scale", k) | scale(layer, "v_scale", v))
    scaled = kit.load(folder)
    add(folder, moved)
    for layer in range(2):
        add(folder, scale(layer, "k_scale", 1.0) | scale(layer, "v_scale", 1.0))
    expected = kit.our_logits(kit.load(folder), narrow=True)
    assert torch.equal(kit.our_logits(scaled, narrow=True), expected)
    assert not torch.equal(kit.our_logits(plain, narrow=True), expected)
    assert torch.equal(kit.our_logits(scaled), kit.our_logits(plain))
