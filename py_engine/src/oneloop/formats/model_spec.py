"""ModelSpec: the shape of a decoder-only model, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies differ from theta^(-2i/d). Which fields count depends on the kind.

    linear: frequencies / factor. dynamic: unchanged up to max_position (NTK beyond it, which is never served).
    llama3: long waves / factor, short ones unchanged, smooth between low_freq_factor and high_freq_factor.
    yarn: interpolated between beta_fast and beta_slow; cos and sin are multiplied by attention_factor.
    factors: frequency i / factors[i] (GGUF's rope_freqs tensor, head_dim / 2 numbers).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """Context length before the scaling (llama3, yarn, dynamic)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Resolved: never left to be derived from the factor."""
    truncate: bool = True
    """yarn: round the bounds of the interpolated range to whole dimensions."""
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Layers whose feed-forward block is a mixture of experts. Sizes are counts."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Of one expert."""
    renormalised: bool
    """The chosen experts' probabilities are divided by their sum (norm_topk_prob; always in Mixtral)."""
    shared_intermediate_size: int = 0
    """Of the expert that every token has beside those chosen; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid of the token (Qwen2-MoE)."""
    sparse_step: int = 1
    """Of so many layers the last is sparse."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain feed-forward block whatever sparse_step says."""
    layout: Literal["qwen", "mixtral"]
    """What the checkpoint calls the tensors; see formats.expected."""

    def is_sparse(self, index: int) -> bool:
        """Whether that layer has experts."""
        return index not in self.dense_layers and (index + 1) % self.sparse_step == 0


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
    quantization: QuantizationSpec | GgufQuantization | None = None
    """How linear maps are stored; None: as plain numbers."""
    short_vectors: tuple[int, ...] | None = None
    """Sizes at which a pooled vector's first numbers are a vector too (Matryoshka); (): any. None: there are none."""
    moe: MoeSpec | None = None
    """None: all layers are dense."""
    kv_scales: tuple[tuple[float, float], ...] = ()
    """What each layer's keys and values are divided by where they are kept in 8 bits; (): by 1."""

    def is_sparse(self, index: int) -> bool:
        """Whether that layer has experts."""
        return self.moe is not None and self.moe.is_sparse(index)
