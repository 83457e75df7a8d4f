"""transformers' own model with the weights of a llama-architecture GGUF file: the yardstick of tests and benches.

Independent of oneloop's loader on purpose: the `gguf` package reads the file and dequantises it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader, quants

if TYPE_CHECKING:
    from pathlib import Path

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def transformers_llama(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A LlamaForCausalLM in eval mode with the file's dequantised weights.

    path: a GGUF file whose general.architecture is llama. dtype: type of every parameter.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    num_heads, num_kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
    state = {}
    for tensor in reader.tensors:
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        name, _, kind = tensor.name.rpartition(".")
        if name.startswith("blk."):
            _, layer, part = name.split(".", 2)
            if part in ("attn_q", "attn_k"):
                weights = _unpermute(weights, num_heads if part == "attn_q" else num_kv_heads)
            target = f"model.layers.{layer}.{_LAYER_NAMES[part]}"
        else:
            target = _GLOBAL_NAMES[name]
        state[f"{target}.{kind}"] = torch.from_numpy(np.array(weights)).to(dtype)
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings="lm_head.weight" not in state,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise ValueError(f"{path.name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # to_empty left its buffers unset
    return model.eval()


def _unpermute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo the interleaving of rotary halves that the GGUF conversion of llama models applies to q and k rows."""
    rows, columns = weights.shape
    half = rows // num_heads // 2
    return weights.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)
