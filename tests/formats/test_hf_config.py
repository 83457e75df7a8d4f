"""config.json and generation_config.json: read as transformers reads them, refused by key where they cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oneloop.errors import ModelError
from oneloop.formats.generation import hf_generation_defaults
from oneloop.formats.hf_config import hf_model_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN2_MOE = {**LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
QWEN3_MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def folder(path: Path, config: dict[str, Any] | bytes) -> Path:
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    (path / "config.json").write_bytes(content)
    return path


def test_a_llama(tmp_path: Path) -> None:
    spec = hf_model_spec(folder(tmp_path, LLAMA))
    assert (spec.architecture, spec.head_dim, spec.num_kv_heads, spec.dtype) == (
        "LlamaForCausalLM",
        16,
        2,
        "bfloat16",
    )
    assert (spec.rope_theta, spec.rope_scaling, spec.tie_word_embeddings) == (10000.0, None, False)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3_MOE],
    ids=lambda config: config["model_type"],
)
@pytest.mark.parametrize(
    "extra", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}]
)
def test_defaults_and_biases_equal_transformers(tmp_path: Path, config: dict, extra: dict) -> None:
    """The parameters of transformers' own model are exactly those that the spec describes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {key: value for key, value in extra.items() if key != "mlp_bias" or config["model_type"] == "llama"}
    spec = hf_model_spec(folder(tmp_path, config | own))
    theirs = AutoConfig.from_pretrained(tmp_path)
    names = dict(AutoModelForCausalLM.from_config(theirs).named_parameters())
    layer = "model.layers.0"
    assert (f"{layer}.self_attn.q_proj.bias" in names) == spec.qkv_bias
    assert (f"{layer}.self_attn.o_proj.bias" in names) == spec.output_bias
    assert (f"{layer}.mlp.gate_proj.bias" in names) == spec.mlp_bias
    assert (f"{layer}.self_attn.q_norm.weight" in names) == spec.qk_norm
    assert ("lm_head.weight" not in names) == spec.tie_word_embeddings
    assert tuple(names[f"{layer}.self_attn.k_proj.weight"].shape) == (spec.num_kv_heads * spec.head_dim, 64)
    assert theirs.rope_parameters["rope_theta"] == spec.rope_theta


@pytest.mark.parametrize(
    "config",
    [
        MIXTRAL,
        MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 1},
        QWEN2_MOE | {"num_experts": 10},
        QWEN2_MOE | {"num_experts": 8, "shared_expert_intermediate_size": 24, "moe_intermediate_size": 12},
        QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [1, 9], "num_experts": 16},
        QWEN3_MOE | {"decoder_sparse_step": 2, "num_local_experts": 16},
    ],
    ids=str,
)
def test_experts_equal_transformers(tmp_path: Path, config: dict) -> None:
    """The sparse blocks of transformers' own model are those that the spec describes, defaults included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = hf_model_spec(folder(tmp_path, config))
    moe = spec.moe
    assert moe is not None
    theirs = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    for index, layer in enumerate(model.model.layers):
        assert hasattr(layer.mlp, "experts") == spec.is_sparse(index)
        if not spec.is_sparse(index):
            continue
        down = layer.mlp.experts.down_proj
        assert tuple(down.shape) == (moe.num_experts, spec.hidden_size, moe.intermediate_size)
        assert layer.mlp.gate.top_k == moe.top_k
        shared = getattr(layer.mlp, "shared_expert", None)
        assert (0 if shared is None else shared.down_proj.in_features) == moe.shared_intermediate_size
        assert hasattr(layer.mlp, "shared_expert_gate") == moe.shared_gate
    assert getattr(theirs, "norm_topk_prob", True) == moe.renormalised
    assert theirs.rms_norm_eps == spec.rms_norm_eps


def test_families_of_experts_without_any(tmp_path: Path) -> None:
    for changes in ({"num_experts": 0}, {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 3}):
        assert hf_model_spec(folder(tmp_path, QWEN3_MOE | changes)).moe is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, rope: dict) -> None:
    spec = hf_model_spec(folder(tmp_path, LLAMA | rope))
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, None)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_scaling(tmp_path: Path) -> None:
    scaling = hf_model_spec(folder(tmp_path, LLAMA | {"rope_scaling": LLAMA3})).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (
        "llama3",
        8,
        1,
        4,
    )
    assert scaling.original_max_position == 64


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"factor": None},
        {"attention_factor": 1.5},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    ],
)
def test_yarn_equals_transformers(tmp_path: Path, extra: dict) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    } | extra
    spec = hf_model_spec(folder(tmp_path, QWEN2 | {"rope_parameters": rope}))
    scaling = spec.rope_scaling
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(tmp_path), None)
    assert scaling.attention_factor == pytest.approx(attention_factor)
    assert scaling.factor == 4.0
    expected = (16, 2, False) if "beta_fast" in extra else (32, 1, True)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == expected


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (config, key named, words of the message)
    "unknown architecture": (
        LLAMA | {"architectures": ["FooForCausalLM"]},
        "architectures",
        "supported are LlamaFor",
    ),
    "no architecture": (LLAMA | {"architectures": None}, "architectures", "class name"),
    "two architectures": (LLAMA | {"architectures": ["A", "B"]}, "architectures", "class name"),
    "remote code": (
        LLAMA | {"architectures": ["Evil"], "auto_map": {"AutoModelForCausalLM": "evil.Evil"}},
        "architectures",
        "never run",
    ),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act", "silu"),
    "activation as code": (LLAMA | {"hidden_act": "os.system"}, "hidden_act", "not supported"),
    "quantised": (
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quantization_config.quant_method",
        "'bitsandbytes' is not supported; supported are compressed-tensors, fbgemm_fp8, fp8, awq, gptq",
    ),
    "missing size": ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size", "missing"),
    "size a string": (LLAMA | {"hidden_size": "64"}, "hidden_size", "whole number"),
    "size true": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
    "size 0": (LLAMA | {"vocab_size": 0}, "vocab_size", "out of range"),
    "more chosen than there are": (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok", "1 to 8"),
    "too many experts": (QWEN3_MOE | {"num_experts": 5000}, "num_experts", "out of range"),
    "no list of layers' types": (QWEN3 | {"layer_types": 3}, "layer_types", "only a list of full_attention"),
    "no list of layers": (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers", "a list of numbers"),
    "no number of a layer": (QWEN3_MOE | {"mlp_only_layers": [True]}, "mlp_only_layers", "a list of numbers"),
    "sparse step zero": (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step", "out of range"),
    "expert without width": (
        QWEN3_MOE | {"moe_intermediate_size": 0},
        "moe_intermediate_size",
        "out of range",
    ),
    "no shared expert": (
        QWEN2_MOE | {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size",
        "out of range",
    ),
    "no biases": (QWEN2_MOE | {"qkv_bias": False}, "qkv_bias", "false is not supported"),
    "a window of Mixtral": (MIXTRAL | {"sliding_window": 128}, "sliding_window", "not supported"),
    "size negative": (LLAMA | {"intermediate_size": -1}, "intermediate_size", "out of range"),
    "size 10^30": (LLAMA | {"hidden_size": 10**30}, "hidden_size", "out of range"),
    "heads do not divide": (
        LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5},
        "num_attention_heads",
        "divide",
    ),
    "KV heads do not divide": (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads", "divide"),
    "more KV heads": (LLAMA | {"num_key_value_heads": 8}, "num_key_value_heads", "out of range"),
    "odd head": (LLAMA | {"head_dim": 15}, "head_dim", "odd"),
    "NaN theta": (LLAMA | {"rope_theta": float("nan")}, "rope_theta", "out of range"),
    "infinite epsilon": (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps", "out of range"),
    "unknown rope": (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type", "spiral"),
    "rope by layer": (
        LLAMA | {"rope_parameters": {"rope_type": {"a": 1}}},
        "rope_parameters.rope_type",
        "string",
    ),
    "rope a list": (LLAMA | {"rope_scaling": [1]}, "rope_scaling", "object"),
    "llama3 without factors": (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        "rope_scaling.low_freq_factor",
        "missing",
    ),
    "llama3 factors crossed": (
        LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
        "rope_scaling.high_freq_factor",
        "above",
    ),
    "linear without factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing"),
    "partial rotation": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "part"),
    "window": (MISTRAL | {"sliding_window": 128}, "sliding_window", "not supported"),
    "window by default": (
        {k: v for k, v in MISTRAL.items() if k != "sliding_window"} | {"max_position_embeddings": 8192},
        "sliding_window",
        "4096 of 8192",
    ),
    "window on the upper layers": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "sliding_window",
        "not supported",
    ),
    "layer types": (
        QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
        "full_attention",
    ),
    "dtype": (LLAMA | {"torch_dtype": "int8"}, "torch_dtype", "int8"),
    "matryoshka, no list": (LLAMA | {"matryoshka_dimensions": 64}, "matryoshka_dimensions", "list of sizes"),
    "matryoshka, too large": (
        LLAMA | {"matryoshka_dimensions": [2, 1 << 20]},
        "matryoshka_dimensions",
        "1 to hidden_size",
    ),
    "tie a string": (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
}


@pytest.mark.parametrize(
    ("extra", "sizes"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [16]}, (16, LLAMA["hidden_size"])),
    ],
)
def test_vectors_that_may_be_cut(tmp_path: Path, extra: dict, sizes: tuple[int, ...] | None) -> None:
    assert hf_model_spec(folder(tmp_path, LLAMA | extra)).short_vectors == sizes


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key(name: str, tmp_path: Path) -> None:
    config, item, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as caught:
        hf_model_spec(folder(tmp_path, config))
    assert caught.value.item == item
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        QWEN2 | {"sliding_window": 64, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
        MISTRAL | {"sliding_window": 256},
        QWEN3 | {"layer_types": ["full_attention"] * 2},
    ],
)
def test_windows_that_change_nothing_are_accepted(tmp_path: Path, config: dict) -> None:
    assert hf_model_spec(folder(tmp_path, config)).max_position == 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b'{"a":' * 100_000, "deep"),
        (b"\xff", "UTF-8"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "twice"),
        (b" " * (5 << 20), "larger"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hf_model_spec(folder(tmp_path, content))


def test_code_beside_the_config_is_never_run(tmp_path: Path) -> None:
    """T4: auto_map on a known architecture is ignored, whatever it points at."""
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    for target in ("evil.Evil", "other/repo--evil.Evil"):
        spec = hf_model_spec(folder(tmp_path, LLAMA | {"auto_map": {"AutoConfig": target}}))
        assert spec.architecture == "LlamaForCausalLM"
    assert not marker.exists()


def test_generation_defaults(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA | {"eos_token_id": 2, "bos_token_id": 1})
    assert hf_generation_defaults(tmp_path).eos_token_ids == (2,)
    values = {"eos_token_id": [5, 6, 5], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = hf_generation_defaults(tmp_path)
    assert (found.eos_token_ids, found.temperature, found.top_p, found.top_k) == ((5, 6), 0.6, 0.9, 20)
    assert (found.max_new_tokens, found.min_p, found.repetition_penalty) == (7, None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -3),
        ("repetition_penalty", 0),
        ("eos_token_id", "x"),
        ("eos_token_id", [-1]),
        ("eos_token_id", [True]),
        ("eos_token_id", list(range(2000))),
        ("max_new_tokens", 0),
    ],
)
def test_impossible_generation_defaults_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError) as caught:
        hf_generation_defaults(tmp_path)
    assert caught.value.item == key
