"""ModelSpec: the shape of a decoder-only model, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary scaling as in Hugging Face's `rope_scaling` / `rope_parameters`."""

    kind: Literal["linear", "llama3", "yarn", "dynamic"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes are counts; names follow Hugging Face's config.json."""

    architecture: str
    """Hugging Face class name, e.g. LlamaForCausalLM."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    """Bias on the query, key and value projections (Qwen2; Llama with attention_bias)."""
    output_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys before the rotary embedding (Qwen3)."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Type the checkpoint declares."""
