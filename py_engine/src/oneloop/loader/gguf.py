"""GGUF tensors → weights: dequantised in chunks, so a load costs little more memory than the weights themselves."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from oneloop.errors import ModelError
from oneloop.loader.progress import Progress, no_progress
from oneloop.loader.reader import RangeReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from oneloop.formats.gguf import GgufFile, GgufTensor
    from oneloop.formats.model_spec import ModelSpec

_log = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time: 1 MiB of float32, so that the dequantiser's intermediates stay in the cache."""

_PLAIN_DTYPES = {"F32": "<f4", "F16": "<f2"}

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
_ROTATED = re.compile(r"\.self_attn\.[qk]_proj\.(weight|bias)$")


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that Hugging Face calls `name`."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise KeyError(name)
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def load_gguf_weights(
    file: GgufFile, spec: ModelSpec, targets: Mapping[str, torch.Tensor], *, progress: Progress = no_progress
) -> None:
    """Fill every target (Hugging Face tensor name → view of a parameter, any device and float type).

    ModelError names the tensor that is missing, misshapen or of a type that cannot be dequantised; nothing is
    read before all are checked.
    """
    pairs = _match(file, targets)
    # llama's converter interleaves the rotary halves of queries and keys; qwen's does not
    interleaved = file.metadata.string("general.architecture") == "llama"
    total = sum(tensor.num_bytes for tensor, _, _ in pairs)
    done = 0
    with ExitStack() as stack:
        readers: dict[Path, RangeReader] = {}
        for tensor, name, target in pairs:
            if tensor.path not in readers:
                readers[tensor.path] = stack.enter_context(RangeReader(tensor.path))
            head_dim = spec.head_dim if interleaved and _ROTATED.search(name) else None
            _fill(readers[tensor.path], tensor, target, head_dim)
            done += tensor.num_bytes
            progress("loading weights", done, total)


def _match(file: GgufFile, targets: Mapping[str, torch.Tensor]) -> list[tuple[GgufTensor, str, torch.Tensor]]:
    """Source, Hugging Face name and target of every tensor, in the order of the file's data."""
    wanted: dict[str, tuple[str, torch.Tensor]] = {}
    for name, target in targets.items():
        wanted[gguf_name(name)] = (name, target)
    for stored_name, (_, target) in wanted.items():
        tensor = file.tensors.get(stored_name)
        if tensor is None:
            raise ModelError(
                str(file.path), "this tensor is missing; the file is incomplete", item=stored_name
            )
        if tensor.shape != tuple(target.shape):
            raise ModelError(
                str(tensor.path),
                f"has shape {list(tensor.shape)}, the model needs {list(target.shape)}",
                item=stored_name,
            )
        if not _can_dequantize(tensor):
            raise ModelError(
                str(tensor.path), f"type {tensor.type.name} cannot be dequantised", item=stored_name
            )
    extra = [name for name in file.tensors if name not in wanted and name != "rope_freqs.weight"]
    if extra:
        _log.warning("%s: %d tensors are not used, e.g. %s", file.path, len(extra), ", ".join(extra[:3]))
    return [(tensor, *wanted[name]) for name, tensor in file.tensors.items() if name in wanted]


def _can_dequantize(tensor: GgufTensor) -> bool:
    if tensor.type.name in _PLAIN_DTYPES:
        return True
    try:
        dequantize(
            np.zeros((1, tensor.type.block_bytes), dtype=np.uint8), GGMLQuantizationType(tensor.type.type_id)
        )
    except (RuntimeError, ValueError):  # not implemented there, or not known to this version of gguf
        return False
    return True


def _fill(reader: RangeReader, tensor: GgufTensor, target: torch.Tensor, head_dim: int | None) -> None:
    """Copy one tensor, whole rows (whole heads, where head_dim is given) at a time."""
    row_elements = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    num_rows = tensor.shape[0]
    unit = head_dim or (1 if len(tensor.shape) > 1 else tensor.type.block_size)
    rows_per_chunk = max(_CHUNK_ELEMENTS // row_elements // unit, 1) * unit
    for start in range(0, num_rows, rows_per_chunk):
        stop = min(start + rows_per_chunk, num_rows)
        first_block = start * row_elements // tensor.type.block_size
        num_blocks = (stop - start) * row_elements // tensor.type.block_size
        raw = reader.read(
            tensor.offset + first_block * tensor.type.block_bytes, num_blocks * tensor.type.block_bytes
        )
        values = _dequantize(tensor, raw).reshape(stop - start, *tensor.shape[1:])
        _copy_rows(target[start:stop], values, head_dim)


def _copy_rows(target: torch.Tensor, values: NDArray[np.floating[Any]], head_dim: int | None) -> None:
    """Copy whole rows; with head_dim, undo the interleaving of each head's rotary halves.

    numpy does it for float32 on the CPU: chunks are small, and torch would start its thread pool for each.
    """
    if head_dim is not None:
        # stored row 2·i + j of a head is row j·head_dim/2 + i
        heads, rest = len(values) // head_dim, values.shape[1:]
        values = values.reshape(heads, head_dim // 2, 2, *rest)
        target = target.view(heads, 2, head_dim // 2, *rest).transpose(1, 2)
    if target.dtype == torch.float32 and target.device.type == "cpu":
        np.copyto(target.numpy(), values)
    else:
        target.copy_(torch.from_numpy(values))


def _dequantize(tensor: GgufTensor, raw: NDArray[np.uint8]) -> NDArray[np.floating[Any]]:
    """Flat array of the elements; float32 for every type but F16."""
    if tensor.type.name in _PLAIN_DTYPES:
        plain: NDArray[np.floating[Any]] = raw.view(_PLAIN_DTYPES[tensor.type.name])
        return plain
    # as one row: the gguf package loops in Python over groups of 16 rows
    values: NDArray[np.floating[Any]] = dequantize(raw[None, :], GGMLQuantizationType(tensor.type.type_id))[0]
    return values
