"""Checkpoints in 8-bit floats, in every layout, and plain ones that become so: logits of the dequantised model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from oneloop.errors import ModelError
from oneloop.formats.quantization.spec import StoredTensor
from oneloop.loader.checkpoint import read_checkpoint
from oneloop.loader.dummy import fill_dummy_weights
from oneloop.loader.hf import load_hf_weights
from oneloop.loader.load import load_model
from oneloop.loader.resolve import resolve_model
from oneloop.models.registry import build_model
from oneloop.quant.base import Incoming
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear.quantize import dequantized, quantize_blocks, quantize_rows

CPU = torch.device("cpu")
ROWS = 64
FLOAT_8 = {"num_bits": 8, "type": "float"}
INPUT_BOUND = 0.1
"""Relative to the logits' norm: what 8-bit activations change in a model of two layers and random weights."""
BOTH_BOUND = 0.16
"""What they and 8-bit weights change."""


def group(weights: dict[str, Any]) -> dict[str, Any]:
    entry = {
        "targets": ["Linear"],
        "weights": {**FLOAT_8, **weights},
        "input_activations": {**FLOAT_8, "dynamic": True},
    }
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": entry}}


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A weight's tensors in the file, by the last part of their names, and what they mean."""


def per_tensor(weight: torch.Tensor, shape: tuple[int, ...]) -> Stored:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale.reshape(shape)}, stored.float() * scale


def per_channel(weight: torch.Tensor) -> Stored:
    stored, scales = quantize_rows(weight)
    return {"weight": stored, "weight_scale": scales[:, None]}, dequantized(stored, scales)


def per_block(weight: torch.Tensor, name: str) -> Stored:
    stored, scales = quantize_blocks(weight, ROWS)
    every_row = scales.repeat_interleave(ROWS, dim=0)[: len(weight)]
    return {"weight": stored, name: scales}, dequantized(stored, every_row)


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "compressed-tensors per tensor": (group({"strategy": "tensor"}), lambda w: per_tensor(w, (1,))),
    "compressed-tensors per channel": (group({"strategy": "channel"}), per_channel),
    "compressed-tensors per block": (
        group({"strategy": "block", "block_structure": [ROWS, 128]}), lambda w: per_block(w, "weight_scale")
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, per_channel),
    "fp8 per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda w: per_tensor(w, ())),
    "fp8 per block": (
        {"quant_method": "fp8", "weight_block_size": [ROWS, 128]}, lambda w: per_block(w, "weight_scale_inv")
    ),
}  # fmt: skip


def tiny() -> Any:
    """Sizes that are no multiples of a block: 96 rows of keys, 192 and 320 columns."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=128, attention_bias=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def linear_maps(model: Any) -> dict[str, torch.nn.Linear]:
    modules = model.model.named_modules()
    return {f"model.{name}": module for name, module in modules if isinstance(module, torch.nn.Linear)}


def quantize_inputs(model: Any, *, by_block: bool, plain: str | None = None) -> None:
    """From here on the model's maps, but those below `plain`, quantise what they are given."""

    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0][0]
        return (dequantized(*(quantize_blocks(x) if by_block else quantize_rows(x)))[None],)

    for name, module in linear_maps(model).items():
        if plain is None or not name.startswith(plain):
            module.register_forward_pre_hook(hook)


def write(
    folder: Path,
    model: Any,
    quantization: dict[str, Any],
    store: Callable[[torch.Tensor], Stored],
    plain: str | None = None,
) -> Path:
    """A checkpoint of the model, whose weights become what the file means."""
    maps = linear_maps(model)
    tensors = dict(model.state_dict())
    for name, module in maps.items():
        if plain is not None and name.startswith(plain):
            continue
        parts, meaning = store(module.weight.detach())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in parts.items()}
        tensors[f"{name}.input_scale"] = torch.tensor(0.5)
        with torch.no_grad():
            module.weight.copy_(meaning)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {
        "architectures": ["LlamaForCausalLM"], "quantization_config": quantization
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def distance(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("plain", [None, "model.layers.0"], ids=["all maps", "one layer left alone"])
def test_logits_are_those_of_the_dequantised_model(
    kit: Any, tmp_path: Path, caplog: Any, name: str, plain: str | None
) -> None:
    quantization, store = LAYOUTS[name]
    key = "ignore" if quantization["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    left = ["lm_head", *([] if plain is None else [plain])]
    model = tiny()
    folder = write(tmp_path / "model", model, {**quantization, key: left}, store, plain)
    ours = kit.our_logits(kit.load(folder))
    assert not caplog.records  # no tensor is called unused
    assert distance(ours, kit.expected_logits(model)) < INPUT_BOUND
    quantize_inputs(model, by_block="block" in name, plain=plain)
    assert distance(ours, kit.expected_logits(model)) < 2e-3


@pytest.mark.parametrize("way", ["fp8", "fp8-block"])
def test_plain_checkpoints_are_quantised_while_loading(kit: Any, tmp_path: Path, way: str) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    wanted = kit.expected_logits(model)
    loaded = load_model(resolve_model(str(tmp_path), quantization=way), dtype=torch.float32, device=CPU)
    ours = kit.our_logits(loaded)
    assert loaded.layers[0].mlp.down.stored.matrix.dtype == FP8
    assert loaded.head.stored.matrix.dtype == torch.float32
    assert distance(ours, wanted) < BOTH_BOUND
    with torch.no_grad():
        for module in linear_maps(model).values():
            weight = module.weight
            stored, scales = quantize_rows(weight) if way == "fp8" else quantize_blocks(weight, 128)
            repeated = scales if way == "fp8" else scales.repeat_interleave(128, dim=0)[: len(weight)]
            weight.copy_(dequantized(stored, repeated))
    quantize_inputs(model, by_block=way == "fp8-block")
    assert distance(ours, kit.expected_logits(model)) < 2e-3


@pytest.mark.parametrize("name", [*LAYOUTS, "fp8", "fp8-block"])
def test_a_load_looks_at_its_scales_once(kit: Any, looks: Any, tmp_path: Path, name: str) -> None:
    """However many there are: each look waits for the device."""
    if name in LAYOUTS:
        source = resolve_model(str(write(tmp_path / "model", tiny(), *LAYOUTS[name])))
    else:
        tiny().save_pretrained(tmp_path)
        source = resolve_model(str(tmp_path), quantization=name)
    for load_format in ("auto", "dummy"):
        with looks() as seen:
            load_model(source, dtype=torch.float32, device=CPU, load_format=load_format)
        assert seen.seen == ["tolist"]


def test_gguf_is_quantised_while_loading(kit: Any) -> None:
    """The embedded model, its queries' and keys' rows in their own order again."""
    plain = kit.load("smollm2")
    loaded = load_model(resolve_model("smollm2", quantization="fp8"), dtype=torch.float32, device=CPU)
    for ours, theirs in zip(loaded.layers[::10], plain.layers[::10], strict=True):
        for name in ("qkv", "output"):
            kept = getattr(ours.attention, name).stored
            stored, scales = quantize_rows(getattr(theirs.attention, name).stored.matrix)
            assert torch.equal(kept.matrix.float(), stored.float())
            assert torch.equal(kept.scales, scales)


def test_a_weight_of_another_type_is_refused(tmp_path: Path) -> None:
    quantization, store = LAYOUTS["fbgemm"]
    folder = write(tmp_path / "model", tiny(), quantization, store)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].float()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="is of type F32; supported are F8_E4M3") as caught:
        resolve_model(str(folder))
    assert caught.value.item == name


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_handed_over_is_whole_and_let_go(tmp_path: Path, num_threads: int) -> None:
    """Quantising while loading needs memory for a few plain tensors at a time, not for the model."""
    tensors = {f"t{index}": torch.randn(50, 30) for index in range(12)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    found = read_checkpoint(tmp_path, {name: StoredTensor(((50, 30),), ("F32",)) for name in tensors})
    taken: dict[str, torch.Tensor] = {}
    handed: list[weakref.ref[torch.Tensor]] = []

    def taker(name: str) -> Callable[[torch.Tensor], None]:
        def take(values: torch.Tensor) -> None:
            assert sum(ref() is not None for ref in handed) <= 2 * num_threads
            handed.append(weakref.ref(values))
            taken[name] = values.clone()

        return take

    targets = {name: Incoming((50, 30), torch.float32, CPU, taker(name)) for name in tensors}
    load_hf_weights(found, targets, num_threads=num_threads, chunk_bytes=7 * 30 * 4)
    assert taken.keys() == tensors.keys()
    assert all(torch.equal(taken[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_dummy_weights_of_every_layout(kit: Any, tmp_path: Path, name: str) -> None:
    quantization, store = LAYOUTS[name]
    spec = resolve_model(str(write(tmp_path / "model", tiny(), quantization, store))).spec
    first, second = (build_model(spec, torch.float32, CPU) for _ in range(2))
    for model in (first, second):
        fill_dummy_weights(model.weight_targets(), seed=1)
    logits = kit.our_logits(first)
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert torch.equal(logits, kit.our_logits(second))
