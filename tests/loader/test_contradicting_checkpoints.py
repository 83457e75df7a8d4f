"""Quantised checkpoints whose parts do not agree: read as their makers' own code reads them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from oneloop.config import QuantizationName
from oneloop.errors import ModelError
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop_bench.quantize.layouts import Layout, config_of, tensors_of
from oneloop_bench.quantize.numbers import Grid, Quantized
from oneloop_kernels.ops.fp8_linear.quantize import quantize_rows

CPU = torch.device("cpu")
SIZE = 32
DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def quantized(out_size: int, in_size: int, seed: int, *, symmetric: bool, shuffled: bool) -> Quantized:
    """Random numbers in groups of SIZE."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(in_size) // SIZE
    if shuffled:
        groups = groups[torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))]
    shape = (out_size, -(-in_size // SIZE))
    zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return Quantized(
        torch.randint(0, 16, (out_size, in_size), generator=generator, dtype=torch.uint8),
        (torch.rand(shape, generator=generator) * 0.02 + 0.01).half(),
        torch.full_like(zeros, 8) if symmetric else zeros,
        groups,
    )


def write(
    folder: Path,
    model: Any,
    layout: Layout,
    *,
    symmetric: bool = False,
    shuffled: bool = False,
    left: str = "nothing",
    config: dict[str, Any] | None = None,
    edit: Callable[[Tensors], None] | None = None,
) -> Path:
    """A checkpoint whose weights become the model's. left: part of the names of maps that are stored plainly.

    config: what is changed in quantization_config. edit: changes the tensors by their names.
    """
    tensors = dict(model.state_dict())
    for index, (name, module) in enumerate(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or left in name:
            continue
        out_size, in_size = module.weight.shape
        q = quantized(out_size, in_size, index, symmetric=symmetric, shuffled=shuffled)
        del tensors[f"{name}.weight"]
        parts = tensors_of(layout, q, by_activation=shuffled, symmetric=symmetric)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        with torch.no_grad():
            module.weight.copy_(q.plain())
    if edit is not None:
        edit(tensors)
    values = config_of(layout, Grid(SIZE, symmetric), by_activation=shuffled)
    weights = values.get("config_groups", {}).get("group_0", {}).get("weights", {})
    for key, value in (config or {}).items():
        (weights if key in weights else values)[key] = value
    return save(folder, model, tensors, values)


def save(folder: Path, model: Any, tensors: Tensors, quantization: dict[str, Any]) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {
        "architectures": ["LlamaForCausalLM"], "quantization_config": quantization
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(part: str) -> Callable[[Tensors], None]:
    """Of all maps."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(f".{part}")]:
            del tensors[name]

    return edit


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def in_second_version(tensors: Tensors) -> None:
    """GPTQ's zeros as they are, instead of less one (modulo 16)."""
    for name, words in tensors.items():
        if name.endswith("qzeros"):
            upper = words & -0x77777778
            tensors[name] = (words & 0x77777777) + 0x11111111 ^ upper


IN_TURN = (torch.arange(96) // SIZE).int()
READ: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gptq's second version under its new name": (
        "gptq", {"config": {"format": "gptq_v2", "checkpoint_format": None}, "edit": in_second_version}
    ),
    "gptq, zeros of 0 stored as 15": ("gptq", {}),
    "gptq's version in capitals": ("gptq", {"config": {"checkpoint_format": "GPTQ"}}),
    "gptq without groups of inputs": ("gptq", {"edit": without("g_idx")}),
    "gptq, only modules of a list": (
        "gptq",
        {
            "config": {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]},
            "left": "self_attn",
        },
    ),
    "awq, a block by its name": ("awq", {"config": {"modules_to_not_convert": ["self_attn"]}, "left": "self_attn"}),
    "awq, a layer with its dot": (
        "awq", {"config": {"modules_to_not_convert": ["model.layers.0."]}, "left": "layers.0."}
    ),
    "compressed, ordered by another name": (
        "compressed-tensors", {"shuffled": True, "config": {"actorder": "Dynamic"}}
    ),
    "compressed, ordered while it was made": ("compressed-tensors", {"config": {"actorder": "static"}}),
    "compressed, groups in turn are told": (
        "compressed-tensors", {"edit": replaced(f"{DOWN}.weight_g_idx", IN_TURN)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_read_as_their_makers_do(kit: Any, tmp_path: Path, name: str) -> None:
    layout, options = READ[name]
    model = kit.tiny_model("llama")
    ours = kit.load(write(tmp_path / "model", model, layout, **options))
    torch.testing.assert_close(kit.our_logits(ours), kit.expected_logits(model), atol=1e-4, rtol=1e-4)


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first number is another."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.clone()
        other.view(-1)[0] = value
        return other

    return change


REFUSED: dict[str, tuple[Layout, dict[str, Any], str, str]] = {
    "gptq, ordered, but not said so": (
        "gptq",
        {"shuffled": True, "config": {"desc_act": False}},
        ".g_idx",
        "do not follow one another, as config.json says; set desc_act",
    ),
    "gptq, groups of none": ("gptq", {"edit": changed(f"{DOWN}.g_idx", first(-1))}, f"{DOWN}.g_idx", "set desc_act"),
    "gptq, ordered, groups of none": (
        "gptq", {"shuffled": True, "edit": changed(f"{DOWN}.g_idx", first(7))}, f"{DOWN}.g_idx", "group_size"
    ),
    "gptq, zeros that are none": (
        "gptq", {"config": {"sym": True}}, ".qzeros", "not all zeros are 8, as sym in config.json says; set it to false"
    ),
    "gptq, one zero": (
        "gptq", {"symmetric": True, "edit": changed(f"{DOWN}.qzeros", first(0))}, f"{DOWN}.qzeros", "sym"
    ),
    "compressed, ordered, but not said so": (
        "compressed-tensors", {"shuffled": True, "config": {"actorder": None}}, ".weight_g_idx", "actorder"
    ),
    "awq, a scale that is no number": (
        "awq", {"edit": changed(f"{DOWN}.scales", first(torch.nan))}, f"{DOWN}.scales", "no finite number as float32"
    ),
    "compressed, an infinite scale": (
        "compressed-tensors",
        {"edit": changed(f"{DOWN}.weight_scale", first(torch.inf))},
        f"{DOWN}.weight_scale",
        "fetch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_file_and_tensor(kit: Any, tmp_path: Path, name: str) -> None:
    layout, options, tensor, message = REFUSED[name]
    folder = write(tmp_path / "model", kit.tiny_model("llama"), layout, **options)
    with pytest.raises(ModelError, match=message) as caught:
        kit.load(folder)
    assert caught.value.file == str(folder / "model.safetensors")
    assert caught.value.item is not None
    assert caught.value.item.endswith(tensor)


def test_scales_too_large_for_the_models_type(kit: Any, tmp_path: Path) -> None:
    edit = changed(f"{DOWN}.scales", lambda scales: first(1e5)(scales.float()))
    folder = write(tmp_path / "model", kit.tiny_model("llama"), "awq", edit=edit)
    with pytest.raises(ModelError, match="no finite number as float16"):
        kit.load(folder, torch.float16)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_of_8_bits_without_a_scale(kit: Any, tmp_path: Path, value: float) -> None:
    model = kit.tiny_model("llama")
    tensors = dict(model.state_dict())
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored, scales = quantize_rows(module.weight.detach())
            tensors |= {f"model.{name}.weight": stored, f"model.{name}.weight_scale": scales[:, None]}
    tensors[f"{DOWN}.weight_scale"] = first(value)(tensors[f"{DOWN}.weight_scale"])
    folder = save(tmp_path / "model", model, tensors, {"quant_method": "fbgemm_fp8"})
    with pytest.raises(ModelError, match="no finite number") as caught:
        kit.load(folder)
    assert caught.value.item == f"{DOWN}.weight_scale"


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_plain_numbers_that_cannot_be_quantised(kit: Any, tmp_path: Path, way: QuantizationName) -> None:
    model = kit.tiny_model("llama")
    with torch.no_grad():
        model.get_submodule(DOWN).weight[3, 4] = torch.inf
    source = resolve_model(str(kit.save(model, tmp_path / "model")), quantization=way)
    with pytest.raises(ModelError, match="no finite number") as caught:
        load_model(source, dtype=torch.float32, device=CPU)
    assert caught.value.item == f"{DOWN}.weight"


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("width", [4, 100])
def test_sizes_that_fill_no_words(kit: Any, tmp_path: Path, method: Layout, width: int) -> None:
    model = kit.tiny_model("llama")
    model.config.intermediate_size = width
    quantization = config_of(method, Grid(SIZE), by_activation=False)
    folder = save(tmp_path / "model", model, dict(model.state_dict()), quantization)
    with pytest.raises(
        ModelError, match=rf"{width} outputs cannot be stored in words of 8 numbers"
    ) as caught:
        resolve_model(str(folder))
    assert (caught.value.file, caught.value.item) == ("config.json", "quantization_config")
