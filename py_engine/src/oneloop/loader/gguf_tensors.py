"""A GGUF header, checked against the model's shape before any weight is read; its tensors' names. No torch."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, NamedTuple

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
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_ALONE = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
"""An expert in a tensor of its own, as files had it before experts were stacked."""
_UNUSED = "rope_freqs.weight"
"""Read with the model's shape, so no weight."""


class Place(NamedTuple):
    """Where a file has what is a tensor in Hugging Face's checkpoints."""

    name: str
    """The file's name of a tensor."""
    part: int | None = None
    """Which part of it, along its first dimension; None: all of it."""


def gguf_place(name: str) -> Place:
    """Where a file has the tensor that Hugging Face calls `name`."""
    if name in _OUTER_NAMES:
        return Place(_OUTER_NAMES[name])
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    expert = _EXPERT.fullmatch(match[2])
    if expert is not None:
        return Place(f"blk.{match[1]}.{_EXPERT_NAMES[expert[2]]}.{match[3]}", int(expert[1]))
    if match[2] not in _LAYER_NAMES:
        raise KeyError(name)
    return Place(f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}")


def weight_types(file: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """Module (Hugging Face's name) → GGUF's name of the type of its weight, for the linear maps that the file has."""
    modules = (name for one in linear_maps(spec) for name in one.names)
    found = ((name, file.tensors.get(gguf_place(f"{name}.weight").name)) for name in modules)
    return {name: tensor.type.name for name, tensor in found if tensor is not None}


def check_gguf(file: GgufFile, expected: Mapping[str, Shape]) -> None:
    """Compare the header with the expected tensors (Hugging Face name → shape).

    ModelError names the tensor that is missing, misshapen or of a type that cannot be dequantised. Tensors that the
    model has no use for are named in one log line.
    """
    wanted: dict[str, Shape] = {}
    for hf_name, shape in expected.items():
        name, part = gguf_place(hf_name)
        wanted[name] = shape if part is None else (max(part + 1, wanted.get(name, (0,))[0]), *shape)
    for name, shape in wanted.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            message = "this tensor is missing; the file is incomplete"
            if "_exps." in name and any(map(_ALONE.fullmatch, file.tensors)):
                message = (
                    "each expert has a tensor of its own here; convert the model again, by a newer llama.cpp"
                )
            raise ModelError(str(file.path), message, item=name)
        if tensor.shape != shape and (1, *tensor.shape) != shape:  # one row may be a vector
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
