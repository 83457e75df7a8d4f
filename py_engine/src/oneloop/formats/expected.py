"""The tensors that a checkpoint must have, from its ModelSpec alone. No torch: headers are checked before its import.

The models' weight_targets() name the same tensors with the same shapes; a test holds the two together.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneloop.formats.model_spec import ModelSpec

Shape = tuple[int, ...]


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Hugging Face tensor name → shape, [out, in] for matrices. A tied head has no tensor of its own."""
    tensors: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    for index in range(spec.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer_tensors(spec).items()}
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return tensors


def layer_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Those of one layer, named from the layer on."""
    hidden, wide, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * head, spec.num_kv_heads * head
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, out_size, in_size, bias in (
        ("self_attn.q_proj", queries, hidden, spec.qkv_bias),
        ("self_attn.k_proj", keys, hidden, spec.qkv_bias),
        ("self_attn.v_proj", keys, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, queries, spec.output_bias),
        ("mlp.gate_proj", wide, hidden, spec.mlp_bias),
        ("mlp.up_proj", wide, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, wide, spec.mlp_bias),
    ):
        tensors[f"{name}.weight"] = (out_size, in_size)
        if bias:
            tensors[f"{name}.bias"] = (out_size,)
    if spec.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return tensors


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in all tensors together."""
    return sum(map(prod, expected_tensors(spec).values()))
