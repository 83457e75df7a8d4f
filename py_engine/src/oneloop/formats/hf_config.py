"""config.json of a Hugging Face folder → ModelSpec. Refuses by name what is not supported; never imports its code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from oneloop.errors import ModelError
from oneloop.formats.hf_moe import hf_moe_spec
from oneloop.formats.json_file import read_json_object
from oneloop.formats.json_values import JsonValues
from oneloop.formats.model_spec import ModelSpec, RopeScaling
from oneloop.formats.quantization.config import read_quantization

_MAX_BYTES = 4 << 20
_MAX_WIDTH = 1 << 20
_MAX_POSITION = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where the architectures differ; defaults are those of transformers' config classes."""

    head_dim: int | None = None
    """Default head size; None: hidden_size / heads."""
    window: Literal["never", "optional", "given", "default"]
    """never: no such thing; optional: only with use_sliding_window; given: where config.json says so; default: 4096
    where it is silent."""
    qkv_bias: bool | None = None
    """None: as attention_bias says."""
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


_FAMILIES = {
    "LlamaForCausalLM": _Family(window="never"),
    "MistralForCausalLM": _Family(window="default", qkv_bias=False, output_bias=False, mlp_bias=False),
    "Qwen2ForCausalLM": _Family(window="optional", qkv_bias=True, output_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": _Family(head_dim=128, window="optional", mlp_bias=False, qk_norm=True),
    "MixtralForCausalLM": _Family(
        window="given", qkv_bias=False, output_bias=False, mlp_bias=False, rope_theta=1e6, rms_norm_eps=1e-5
    ),
    "Qwen2MoeForCausalLM": _Family(window="optional", qkv_bias=True, output_bias=False, mlp_bias=False),
    "Qwen3MoeForCausalLM": _Family(window="optional", mlp_bias=False, qk_norm=True),
}
_ACTIVATIONS = ("silu", "swish")
"""Two names of one function. A table: names in config.json are never looked up as code."""
_DTYPES = ("float32", "bfloat16", "float16")


def hf_model_spec(folder: Path) -> ModelSpec:
    """The model's shape from `folder`/config.json.

    ModelError names the key that is missing, impossible or not supported. A config that names code (auto_map) is
    read like any other: the code is never imported, and an architecture not in our table is refused.
    """
    path = folder / "config.json"
    config = JsonValues(str(path), read_json_object(path, max_bytes=_MAX_BYTES))
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_variants(config)
    hidden_size = config.integer("hidden_size", 1, _MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, 4096)
    num_kv_heads = config.integer("num_key_value_heads", 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"{num_kv_heads} does not divide the {num_heads} attention heads")
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    max_position = config.integer("max_position_embeddings", 1, _MAX_POSITION)
    num_layers = config.integer("num_hidden_layers", 1, 4096)
    _refuse_window(config, family, max_position, num_layers)
    theta, scaling = _rope(config, family, max_position)
    attention_bias = config.boolean("attention_bias", default=False)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, _MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size", 1, 1 << 24),
        max_position=max_position,
        rms_norm_eps=config.real("rms_norm_eps", 1e-12, 1.0, default=family.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=config.boolean("mlp_bias", default=False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(config),
        quantization=read_quantization(config),
        short_vectors=_short_vectors(config, hidden_size),
        moe=hf_moe_spec(config, architecture, num_layers),
    )


def _short_vectors(config: JsonValues, hidden_size: int) -> tuple[int, ...] | None:
    """`is_matryoshka`, `matryoshka_dimensions`: what embedding models say of vectors that are cut."""
    key = "matryoshka_dimensions"
    sizes = config.raw(key)
    if sizes is None:
        return () if config.boolean("is_matryoshka", default=False) else None
    if not isinstance(sizes, list) or not sizes:
        config.fail(key, "a list of sizes is needed")
    for size in sizes:
        if type(size) is not int or not 1 <= size <= hidden_size:
            config.fail(key, f"must hold sizes of 1 to hidden_size ({hidden_size})")
    return tuple(sorted({*sizes, hidden_size}))


def _architecture(config: JsonValues) -> str:
    names = config.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", "one class name in a list is needed")
    name: str = names[0]
    if name not in _FAMILIES:
        hint = " (code that comes with a model is never run)" if "auto_map" in config else ""
        config.fail("architectures", f"{name!r} is not supported{hint}; supported are {', '.join(_FAMILIES)}")
    return name


def _refuse_variants(config: JsonValues) -> None:
    activation = config.string("hidden_act", default="silu")
    if activation not in _ACTIVATIONS:
        config.fail("hidden_act", f"{activation!r} is not supported; supported is silu")
    if not config.boolean("qkv_bias", default=True):
        config.fail("qkv_bias", "false is not supported; models of this family have biases on q, k and v")


def _head_dim(config: JsonValues, family: _Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in config or family.head_dim is not None:
        head_dim = config.integer("head_dim", 2, 4096, default=family.head_dim)
    elif hidden_size % num_heads:
        config.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        config.fail("head_dim", f"{head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _refuse_window(config: JsonValues, family: _Family, max_position: int, num_layers: int) -> None:
    """Sliding-window attention is refused where it would change anything."""
    types = config.raw("layer_types")
    if types is not None and (not isinstance(types, list) or any(kind != "full_attention" for kind in types)):
        config.fail("layer_types", "only a list of full_attention layers are supported")
    if family.window == "never":
        return
    if family.window == "given" and "sliding_window" not in config:
        return
    if family.window == "optional":
        if not config.boolean("use_sliding_window", default=False):
            return
        if config.integer("max_window_layers", 0, 1 << 20, default=28) >= num_layers:
            return
    if config.has_null("sliding_window"):
        return
    window = config.integer("sliding_window", 1, 1 << 40, default=4096)
    if window < max_position:
        config.fail(
            "sliding_window",
            f"attention windows ({window} of {max_position} positions) are not supported; "
            f"set it to null and max_position_embeddings to {window} to serve the model within its window",
        )


def _rope(config: JsonValues, family: _Family, max_position: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    if config.real("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        config.fail("partial_rotary_factor", "rotating only a part of each head is not supported")
    theta = config.real("rope_theta", 1.0, 1e12, default=family.rope_theta)
    for key in ("rope_parameters", "rope_scaling"):
        if key in config:
            values = config.object(key)
            theta = values.real("rope_theta", 1.0, 1e12, default=theta)
            return theta, _rope_scaling(values, config, max_position)
    return theta, None


def _rope_scaling(values: JsonValues, config: JsonValues, max_position: int) -> RopeScaling | None:
    kind = values.string("rope_type", default=values.string("type", default="default"))
    if kind == "default":
        return None
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        values.fail(
            "rope_type", f"{kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn"
        )
    if values.real("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
        values.fail("partial_rotary_factor", "rotating only a part of each head is not supported")
    original = values.integer(
        "original_max_position_embeddings",
        1,
        _MAX_POSITION,
        default=config.integer("original_max_position_embeddings", 1, _MAX_POSITION, default=max_position),
    )
    default_factor = max_position / original if kind == "yarn" else None
    factor = values.real("factor", 1e-3, 1e6, default=default_factor)
    if kind == "llama3":
        low = values.real("low_freq_factor", 1e-6, 1e6)
        high = values.real("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            values.fail("high_freq_factor", f"{high} must be above low_freq_factor {low}")
        return RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=values.real("beta_fast", 1e-3, 1e6, default=32.0),
            beta_slow=values.real("beta_slow", 1e-3, 1e6, default=1.0),
            attention_factor=_yarn_attention_factor(values, factor),
            truncate=values.boolean("truncate", default=True),
        )
    return RopeScaling(
        kind=cast("Literal['linear', 'dynamic']", kind), factor=factor, original_max_position=original
    )


def _yarn_attention_factor(values: JsonValues, factor: float) -> float:
    """YaRN's temperature 0.1·m·ln(factor) + 1 (arXiv 2309.00071, section 3.4), as a ratio where two m are given."""
    if "attention_factor" in values:
        return values.real("attention_factor", 1e-3, 1e3)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    above = values.real("mscale", 0.0, 1e3, default=0.0)
    below = values.real("mscale_all_dim", 0.0, 1e3, default=0.0)
    return temperature(above) / temperature(below) if above and below else temperature(1.0)


def _dtype(config: JsonValues) -> Literal["float32", "bfloat16", "float16"]:
    """dtype, in older files torch_dtype; float32 where the file is silent (as transformers reads it)."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = config.string(key, default="float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(
            config.file, f"{name!r} is not supported; supported are {', '.join(_DTYPES)}", item=key
        )
    return cast("Literal['float32', 'bfloat16', 'float16']", name)
