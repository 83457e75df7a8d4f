"""GGUF metadata → ModelSpec, for the architectures of Llama and Qwen, with experts too. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from oneloop.formats.gguf_moe import gguf_moe_spec
from oneloop.formats.model_spec import ModelSpec, RopeScaling

if TYPE_CHECKING:
    from oneloop.formats.gguf import GgufFile, GgufTensor
    from oneloop.formats.gguf_metadata import GgufMetadata

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""GGUF's general.architecture → the class name of config.json. A llama with experts is a Mixtral."""

_EMBEDDING = "token_embd.weight"
_ROUTER = "ffn_gate_inp"
"""In names of tensors that have float32 whatever the model has."""
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_WIDTH = 1 << 20
_MAX_LAYERS = 4096
_MAX_POSITION = 1 << 26


def gguf_model_spec(file: GgufFile) -> ModelSpec:
    """The model's shape. ModelError names the key that is missing, impossible or not supported."""
    metadata = file.metadata
    arch = metadata.string("general.architecture")
    if arch not in ARCHITECTURES:
        message = f"'{arch}' is not supported; supported are {', '.join(ARCHITECTURES)}"
        metadata.fail("general.architecture", message)
    _refuse_variants(metadata, arch)
    hidden_size = metadata.integer(f"{arch}.embedding_length", 1, _MAX_WIDTH)
    num_heads = metadata.integer(f"{arch}.attention.head_count", 1, 4096)
    num_kv_heads = _num_kv_heads(metadata, arch, num_heads)
    head_dim = _head_dim(metadata, arch, hidden_size, num_heads)
    feed_forward = metadata.integer(f"{arch}.feed_forward_length", 1, _MAX_WIDTH)
    moe = gguf_moe_spec(metadata, arch, feed_forward)
    return ModelSpec(
        architecture="MixtralForCausalLM" if arch == "llama" and moe else ARCHITECTURES[arch],
        hidden_size=hidden_size,
        intermediate_size=feed_forward,
        num_layers=metadata.integer(f"{arch}.block_count", 1, _MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(file, arch, hidden_size),
        max_position=metadata.integer(f"{arch}.context_length", 1, _MAX_POSITION),
        rms_norm_eps=metadata.real(f"{arch}.attention.layer_norm_rms_epsilon", 1e-12, 1.0),
        rope_theta=metadata.real(f"{arch}.rope.freq_base", 1.0, 1e12, default=10000.0),
        rope_scaling=_rope_scaling(file, arch, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch in ("qwen2", "qwen2moe") or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=arch in ("qwen3", "qwen3moe"),
        dtype=_dtype(file),
        moe=moe,
    )


def _refuse_variants(metadata: GgufMetadata, arch: str) -> None:
    """Features that share the architecture's name but need other mathematics."""
    window = f"{arch}.attention.sliding_window"
    context = metadata.integer(f"{arch}.context_length", 1, _MAX_POSITION)
    if 0 < metadata.integer(window, 0, 1 << 32, default=0) < context:
        metadata.fail(window, "sliding-window attention is not supported")


def _num_kv_heads(metadata: GgufMetadata, arch: str, num_heads: int) -> int:
    key = f"{arch}.attention.head_count_kv"
    if metadata.is_array(key):
        metadata.fail(key, "layers with different numbers of KV heads are not supported")
    num_kv_heads = metadata.integer(key, 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        metadata.fail(key, f"{num_kv_heads} does not divide the {num_heads} attention heads")
    return num_kv_heads


def _head_dim(metadata: GgufMetadata, arch: str, hidden_size: int, num_heads: int) -> int:
    key = f"{arch}.attention.key_length"
    if key in metadata:
        head_dim = metadata.integer(key, 2, 4096)
    elif hidden_size % num_heads:
        metadata.fail(
            f"{arch}.attention.head_count", f"{num_heads} does not divide the embedding length {hidden_size}"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        metadata.fail(key, f"head size {head_dim} is odd; rotary embedding needs an even one")
    for other, what in (
        (f"{arch}.attention.value_length", "values of another size than keys"),
        (f"{arch}.rope.dimension_count", "rotating only a part of each head"),
    ):
        if metadata.integer(other, 1, 4096, default=head_dim) != head_dim:
            metadata.fail(other, f"differs from the head size {head_dim}: {what} is not supported")
    return head_dim


def _vocab_size(file: GgufFile, arch: str, hidden_size: int) -> int:
    """Rows of the embedding; everything else that names a vocabulary size must agree."""
    metadata = file.metadata
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None:
        metadata.fail(_EMBEDDING, "this tensor is missing")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        metadata.fail(
            _EMBEDDING, f"shape {list(embedding.shape)} does not fit the embedding length {hidden_size}"
        )
    rows = embedding.shape[0]
    claimed = metadata.integer(f"{arch}.vocab_size", 1, 1 << 32, default=rows)
    if claimed != rows:
        metadata.fail(f"{arch}.vocab_size", f"claims {claimed} tokens, {_EMBEDDING} has {rows} rows")
    if "tokenizer.ggml.tokens" in metadata:
        tokens = len(metadata.strings("tokenizer.ggml.tokens"))
        if tokens != rows:
            metadata.fail("tokenizer.ggml.tokens", f"has {tokens} tokens, {_EMBEDDING} has {rows} rows")
    return rows


def _rope_scaling(file: GgufFile, arch: str, head_dim: int) -> RopeScaling | None:
    metadata = file.metadata
    prefix = f"{arch}.rope.scaling"
    kind = metadata.string(f"{prefix}.type", default="none")
    if _ROPE_FACTORS in file.tensors:
        if kind not in ("none", "llama3"):
            metadata.fail(f"{prefix}.type", f"'{kind}' together with {_ROPE_FACTORS} is not supported")
        return RopeScaling(kind="factors", factors=_rope_factors(file, file.tensors[_ROPE_FACTORS], head_dim))
    if kind == "none":
        legacy = metadata.real(f"{arch}.rope.scale_linear", 1e-3, 1e6, default=1.0)
        return RopeScaling(kind="linear", factor=legacy) if legacy != 1.0 else None
    if kind not in ("linear", "yarn"):
        metadata.fail(f"{prefix}.type", f"'{kind}' is not supported; supported are none, linear, yarn")
    factor = metadata.real(f"{prefix}.factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    attention = metadata.real(f"{prefix}.attn_factor", 1e-3, 1e3, default=1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=metadata.integer(f"{prefix}.original_context_length", 1, _MAX_POSITION),
        beta_fast=metadata.real(f"{prefix}.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=metadata.real(f"{prefix}.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        # YaRN's published temperature, times the file's own factor
        attention_factor=attention * (1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0),
    )


def _rope_factors(file: GgufFile, tensor: GgufTensor, head_dim: int) -> tuple[float, ...]:
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        file.metadata.fail(
            tensor.name, f"is {tensor.type.name} {list(tensor.shape)}, F32 [{head_dim // 2}] is needed"
        )
    with tensor.path.open("rb") as data:
        data.seek(tensor.offset)
        factors = np.frombuffer(data.read(tensor.num_bytes), dtype="<f4")
    if not np.isfinite(factors).all() or (factors <= 0).any():
        file.metadata.fail(tensor.name, "has entries that are not finite and positive")
    return tuple(factors.tolist())


def _dtype(file: GgufFile) -> Literal["float32", "bfloat16", "float16"]:
    """Type of the matrices; quantised ones count as bfloat16, whose range no activation leaves."""
    matrices = (
        tensor
        for name, tensor in file.tensors.items()
        if name.startswith("blk.") and len(tensor.shape) == 2 and _ROUTER not in name
    )
    first = next(matrices, None)
    if first is not None and first.type.name == "F32":
        return "float32"
    return "float16" if first is not None and first.type.name == "F16" else "bfloat16"
