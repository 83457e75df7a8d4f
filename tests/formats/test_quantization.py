"""quantization_config: the layouts that are read, what is refused by key, and which tensors follow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from oneloop.errors import ConfigError, ModelError
from oneloop.formats.expected import stored_tensors
from oneloop.formats.json_values import JsonValues
from oneloop.formats.model_spec import ModelSpec, MoeSpec
from oneloop.formats.quantization.config import chosen_quantization, read_quantization
from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.int4 import Int4Scheme
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.models.registry import build_model
from oneloop.worker.memory.sizes import weight_bytes

SPEC = ModelSpec(
    architecture="LlamaForCausalLM", hidden_size=160, intermediate_size=320, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=40, vocab_size=50, max_position=64, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
    tie_word_embeddings=False, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, dtype="bfloat16",
)  # fmt: skip
FLOAT_8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT_4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def group(weights: dict[str, Any], activations: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """compressed-tensors' config with one group."""
    entry = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": entry}, **changes
    }  # fmt: skip


def read(values: dict[str, Any]) -> QuantizationSpec | None:
    return read_quantization(JsonValues("config.json", {"quantization_config": values}))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
DYNAMIC = {**FLOAT_8, "strategy": "token", "dynamic": True}
READ: dict[str, tuple[dict[str, Any], Fp8Scheme | Int4Scheme]] = {
    "per channel": (group({**FLOAT_8, "strategy": "channel"}, DYNAMIC), Fp8Scheme(scales="channel")),
    "per tensor": (group({**FLOAT_8, "strategy": "tensor"}, FLOAT_8), Fp8Scheme(scales="tensor")),
    "per block": (
        group({**FLOAT_8, "strategy": "block", "block_structure": [64, 128]}, DYNAMIC),
        Fp8Scheme(scales="block", block_rows=64),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8Scheme(scales="channel")),
    "fp8 per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8Scheme(scales="tensor")),
    "fp8 per block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        Fp8Scheme(scales="block", scale_name="weight_scale_inv"),
    ),
    "packed": (
        group(INT_4, None, format="pack-quantized"),
        Int4Scheme(layout="compressed-tensors", group_size=32, zero_points=False),
    ),
    "packed per channel, zero points": (
        group({**INT_4, "strategy": "channel", "symmetric": False}, None),
        Int4Scheme(layout="compressed-tensors", group_size=None, zero_points=True),
    ),
    "awq": (AWQ, Int4Scheme(layout="awq", group_size=32, zero_points=True)),
    "gptq": (GPTQ, Int4Scheme(layout="gptq", group_size=32, zero_points=False, zeros_less_one=True)),
    "gptq in its own order": (
        {**GPTQ, "group_size": -1, "desc_act": True, "sym": False},
        Int4Scheme(layout="gptq", group_size=None, zero_points=True, act_order=True, zeros_less_one=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_layouts(name: str) -> None:
    values, scheme = READ[name]
    found = read(values)
    assert found is not None
    assert (found.method, found.scheme) == (values["quant_method"], scheme)
    assert "lm_head" in found.ignored


def test_no_quantization() -> None:
    assert read_quantization(JsonValues("config.json", {"quantization_config": None})) is None


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "activations of other numbers": (
        group({**FLOAT_8, "strategy": "channel"}, {"type": "int", "num_bits": 8}),
        "config_groups.group_0.input_activations.type",
        "only activations of 8-bit floats",
    ),
    "8-bit floats by another strategy": (
        group({**FLOAT_8, "strategy": "group"}, DYNAMIC),
        "config_groups.group_0.weights.strategy",
        "supported are tensor, channel, block",
    ),
    "4 bits by another strategy": (
        group({**INT_4, "strategy": "tensor"}, None),
        "config_groups.group_0.weights.strategy",
        "supported are group, channel",
    ),
    "4 bits beside 8-bit activations": (
        group(INT_4, DYNAMIC), "config_groups.group_0.input_activations", "only plain activations are supported"
    ),
    "awq without zeros": ({**AWQ, "zero_point": False}, "zero_point", "the layout has zero points"),
    "no method": ({"bits": 4}, "quant_method", "missing"),
    "unknown method": ({"quant_method": "hqq"}, "quant_method", "supported are compressed-tensors, fbgemm_fp8, fp8"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e4m3"),
    "blocks of other columns": ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "weight_block_size", "128"),
    "3 bits": ({**GPTQ, "bits": 3}, "bits", "supported is 4"),
    "gptq's third format": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "gptq"),
    "a head of 4 bits": ({**GPTQ, "lm_head": True}, "lm_head", "not supported"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version", "gemm"),
    "awq gemv, by its new name": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv"}, "format", "gemm"
    ),
    "llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend", "AutoAWQ"),
    "gptq's third format, by its new name": ({**GPTQ, "format": "marlin"}, "format", "gptq_v2"),
    "marlin": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", "take the GPTQ checkpoint"),
    "words of 16 bits": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype", "int32"),
    "modules with settings of their own": ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic", "some modules"),
    "groups of none": ({**AWQ, "group_size": 0}, "group_size", "-1"),
    "8-bit integers": (
        group({"num_bits": 8, "type": "int", "strategy": "channel"}, DYNAMIC),
        "config_groups.group_0.weights.type",
        "8-bit int is not supported",
    ),
    "weights alone": (
        group({**FLOAT_8, "strategy": "channel"}, None), "config_groups.group_0.input_activations", "not supported"
    ),
    "other modules": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Conv"], "weights": FLOAT_8}}},
        "config_groups.a.targets",
        "Linear",
    ),
    "two groups": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups", "2 groups"
    ),
    "floats with zero points": (
        group({**FLOAT_8, "strategy": "channel", "symmetric": False}, DYNAMIC),
        "config_groups.group_0.weights.symmetric",
        "no zero points",
    ),
    "an order of another kind": (
        group({**INT_4, "actorder": "random"}, None), "config_groups.group_0.weights.actorder", "group, dynamic, weight"
    ),
    "rotated weights": (
        group(INT_4, None, transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "transform_config",
        "rotated weights are not supported",
    ),
    "weights with gaps": (
        group(INT_4, None, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format", "dense"
    ),
    "a group's own layout": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "a": {"targets": ["Linear"], "weights": INT_4, "format": "marlin-24"}}},
        "config_groups.a.format",
        "pack-quantized",
    ),
    "no list of names": ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "no list"),
    "no pattern": (
        group({**FLOAT_8, "strategy": "channel"}, DYNAMIC, ignore=["re:("]), "ignore", "no regular expression"
    ),
    "a pattern beyond all bounds": (
        group(INT_4, None, ignore=["re:a{99999999999999999999}"]), "ignore", "the repetition number is too large"
    ),
    "a pattern that takes for ever": (group(INT_4, None, ignore=[r"re:(\w+\.?)+X"]), "ignore", "too long to match"),
    "a pattern that takes long": (group(INT_4, None, ignore=["re:" + ".*" * 20 + "X"]), "ignore", "at most 4 repeats"),
    "too many patterns": (group(INT_4, None, ignore=["re:a"] * 257), "ignore", "at most 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key(name: str) -> None:
    values, key, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as caught:
        read(values)
    assert caught.value.item == f"quantization_config.{key}"


@pytest.mark.parametrize(
    "entry",
    ["model.layers.1", "model.layers.1.", "layers.1.mlp.down_proj", "down_proj", "1.mlp", "re:.*down_proj$"],
)
def test_modules_left_alone(entry: str) -> None:
    found = QuantizationSpec(method="fp8", scheme=Fp8Scheme(scales="tensor"), ignored=(entry,))
    assert found.scheme_of(["model.layers.1.mlp.down_proj"]) is None
    assert found.scheme_of(["model.layers.11.mlp.up_proj", "model.layers.11.mlp.gate_proj"]) is found.scheme


def test_only_some_modules_of_a_layer() -> None:
    found = read(
        {**GPTQ, "modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]}
    )
    assert found is not None
    assert found.scheme_of(["model.layers.1.self_attn.o_proj"]) is None
    assert found.scheme_of(["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]) is found.scheme


def test_modules_that_gptq_has_left_alone() -> None:
    """By patterns, as GPTQModel writes them, say for the routers of a model with experts."""
    found = read({**GPTQ, "dynamic": {r"-:.*\.mlp\.gate$": {}, r"-:model\.layers\.[01]\.": {}}})
    assert found is not None
    assert found.scheme_of(["model.layers.1.mlp.experts.0.up_proj"]) is None
    assert found.scheme_of(["model.layers.7.mlp.gate"]) is None
    assert (
        found.scheme_of(["model.layers.7.mlp.experts.0.gate_proj", "model.layers.7.mlp.up_proj"])
        is found.scheme
    )
    with pytest.raises(ModelError, match="may take too long") as caught:
        read({**GPTQ, "dynamic": {"-:(a*)*b": {}}})
    assert caught.value.item == "quantization_config.dynamic"


PATTERNS = (
    "re:.*lm_head",
    r"re:.*layers\.\d+\.mlp\.(gate|up)_proj",
    "re:.*self_attn.*",
    r"re:model\.layers\.[0-3]\..*",
)


def test_patterns_that_checkpoints_have() -> None:
    found = read(group(INT_4, None, ignore=list(PATTERNS)))
    assert found is not None
    assert found.scheme_of(["model.layers.7.mlp.gate_proj", "model.layers.7.mlp.up_proj"]) is None
    assert found.scheme_of(["model.layers.17.self_attn.o_proj"]) is None
    assert found.scheme_of(["model.layers.2.mlp.down_proj"]) is None
    assert found.scheme_of(["model.layers.4.mlp.down_proj"]) is found.scheme


def test_a_fused_map_is_left_alone_as_a_whole() -> None:
    found = QuantizationSpec(method="fp8", scheme=Fp8Scheme(scales="tensor"), ignored=("a.k_proj",))
    with pytest.raises(ModelError, match=r"leaves a\.k_proj alone, but not .*: a\.q_proj, a\.v_proj"):
        found.scheme_of(["a.q_proj", "a.k_proj", "a.v_proj"])


def test_a_message_names_few_of_many_experts() -> None:
    names = [f"a.experts.{expert}.{half}" for expert in range(40) for half in ("w1", "w3")]
    found = QuantizationSpec(method="fp8", scheme=Fp8Scheme(scales="tensor"), ignored=("experts.7",))
    pattern = (
        r"leaves a\.experts\.7\.w1, a\.experts\.7\.w3 alone, but not .*: a\.experts\.0\.w1, .* and 74 more"
    )
    with pytest.raises(ModelError, match=pattern):
        found.scheme_of(names)


def quantized_spec(name: str, **changes: Any) -> ModelSpec:
    return replace(SPEC, quantization=read(READ[name][0]), **changes)


@pytest.mark.parametrize("name", [name for name in READ if isinstance(READ[name][1], Fp8Scheme)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stored_tensors_are_the_models_targets(name: str, tied: bool) -> None:
    spec = quantized_spec(name, tie_word_embeddings=tied)
    stored = stored_tensors(spec)
    targets = build_model(spec, torch.bfloat16, torch.device("cpu")).weight_targets()
    assert {key: tensor.shapes[0] for key, tensor in stored.items()} == {
        key: tuple(target.shape) for key, target in targets.items()
    }
    assert stored["model.layers.0.mlp.up_proj.weight"].dtypes == ("F8_E4M3",)


@pytest.mark.parametrize("name", [name for name in READ if isinstance(READ[name][1], Fp8Scheme)])
def test_weights_take_what_the_model_allocates(name: str) -> None:
    spec = quantized_spec(name)
    model = build_model(spec, torch.bfloat16, torch.device("cpu"))
    maps = [
        m
        for layer in model.layers
        for m in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    kept = sum(m.stored.matrix.nbytes + m.stored.scales.nbytes for m in maps)
    plain = sum(size for _, size in plain_bytes(spec))
    assert weight_bytes(spec, 2, on_gpu=False) == kept + plain


SPARSE = {
    "architecture": "Qwen2MoeForCausalLM",
    "qkv_bias": True,
    "qk_norm": False,
    "moe": MoeSpec(
        num_experts=3, top_k=2, intermediate_size=24, renormalised=True, shared_intermediate_size=40, shared_gate=True,
        layout="qwen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in READ if isinstance(READ[name][1], Fp8Scheme)])
def test_experts_are_stored_and_counted_like_maps(name: str) -> None:
    spec = quantized_spec(name, **SPARSE)
    stored = stored_tensors(spec)
    model = build_model(spec, torch.bfloat16, torch.device("cpu"))
    targets = model.weight_targets()
    assert {key: tensor.shapes[0] for key, tensor in stored.items()} == {
        key: tuple(target.shape) for key, target in targets.items()
    }
    expert = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert stored[expert].dtypes == ("F8_E4M3",)
    assert "F8_E4M3" not in stored["model.layers.0.mlp.gate.weight"].dtypes
    alone = sum(math.prod(tensor.shapes[0]) for tensor in stored.values() if "F8_E4M3" not in tensor.dtypes)
    scales = sum(
        math.prod(tensor.shapes[0]) for key, tensor in stored.items() if "scale" in key.rsplit(".", 1)[-1]
    )
    maps = [
        m.stored
        for layer in model.layers
        for m in (
            layer.attention.qkv, layer.attention.output, layer.sparse.shared.gate_up, layer.sparse.shared.down
        )
    ]  # fmt: skip
    kept = sum(m.matrix.nbytes + m.scales.nbytes for m in maps)
    for layer in model.layers:
        for weight in (layer.sparse.experts.gate_up, layer.sparse.experts.down):
            kept += weight.values.nbytes + weight.scales.nbytes
    assert weight_bytes(spec, 2, on_gpu=True) == kept + 2 * (alone - scales)


def plain_bytes(spec: ModelSpec) -> list[tuple[str, int]]:
    """Names and bytes of the tensors that are kept in 16 bits."""
    quantized = ("weight_scale", "weight_scale_inv")
    stored = stored_tensors(spec)
    return [
        (name, 2 * torch.Size(tensor.shapes[0]).numel())
        for name, tensor in stored.items()
        if tensor.dtypes != ("F8_E4M3",) and not name.endswith(quantized)
    ]


def test_the_setting_and_the_checkpoint_agree() -> None:
    found = read(AWQ)
    assert chosen_quantization(found, None, "m") is found
    assert chosen_quantization(found, "awq", "m") is found
    made = chosen_quantization(None, "fp8-block", "m")
    assert made is not None
    assert made.scheme == Fp8Scheme(scales="block", stored=False)
    with pytest.raises(ConfigError, match="m is quantised already, by awq; leave --quantization away"):
        chosen_quantization(found, "fp8", "m")
    with pytest.raises(ConfigError, match="is awq, but m is not; fp8 or fp8-block"):
        chosen_quantization(None, "awq", "m")
