"""A GGUF header, checked against the model's shape before any weight is read; its tensors' names. No torch."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from oneloop.errors import ModelError
from oneloop.formats.expected import linear_maps
from oneloop.formats.ggml_types import DEQUANTIZABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.expected import Shape
    from oneloop.formats.gguf import GgufFile
    from oneloop.formats.model_spec import ModelSpec

_log = logging.getLogger(__name__)

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_UNUSED = "rope_freqs.weight"
"""Read with the model's shape, so no weight."""


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that Hugging Face calls `name`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise KeyError(name)
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def weight_types(file: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """Module (Hugging Face's name) → GGUF's name of the type of its weight, for the linear maps that the file has."""
    modules = (name for one in linear_maps(spec) for name in one.names)
    found = ((name, file.tensors.get(gguf_name(f"{name}.weight"))) for name in modules)
    return {name: tensor.type.name for name, tensor in found if tensor is not None}


def check_gguf(file: GgufFile, expected: Mapping[str, Shape]) -> None:
    """Compare the header with the expected tensors (Hugging Face name → shape).

    ModelError names the tensor that is missing, misshapen or of a type that cannot be dequantised. Tensors that the
    model has no use for are named in one log line.
    """
    wanted = {gguf_name(name): shape for name, shape in expected.items()}
    for name, shape in wanted.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(str(file.path), "this tensor is missing; the file is incomplete", item=name)
        if tensor.shape != shape:
            message = f"has shape {list(tensor.shape)}, the model needs {list(shape)}"
            raise ModelError(str(tensor.path), message, item=name)
        if tensor.type.name not in DEQUANTIZABLE:
            message = (
                f"type {tensor.type.name} cannot be dequantised; convert the model to another one, say Q8_0"
            )
            raise ModelError(str(tensor.path), message, item=name)
    extra = [name for name in file.tensors if name not in wanted and name != _UNUSED]
    if extra:
        _log.warning("%s: %d tensors are not used, e.g. %s", file.path, len(extra), ", ".join(extra[:3]))
