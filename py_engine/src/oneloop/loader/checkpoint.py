"""A folder's safetensors headers, checked against the model's shape before any weight is read. No torch."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, TypeAlias

from oneloop.errors import ModelError
from oneloop.formats.json_file import read_json_object
from oneloop.formats.safetensors import SafetensorsTensor, read_safetensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from oneloop.formats.quantization.spec import StoredTensor

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_HARMLESS = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$|(^|\.)attention\.(masked_)?bias$"
    r"|\.(input_scale|input_scale_ub|activation_scale|q_scale|prob_scale|weight_shape)$"
)
"""Buffers that old checkpoints carry along, and what quantised ones say twice or of activations, which are scaled as
they come."""


def read_checkpoint(
    folder: Path, expected: Mapping[str, StoredTensor], also: Collection[str] = ()
) -> dict[str, SafetensorsTensor]:
    """Where each expected tensor lies (by its Hugging Face name), in the order of the files' data. also: names that are
    looked up too, whatever is behind them.

    ModelError when the folder has no safetensors, its index names other files, or a tensor is missing, misshapen or of
    another type: it names the tensor. Tensors that the model has no use for are named in one log line.
    """
    tensors, absent = _read_headers(folder)
    for name, stored in expected.items():
        if name in absent:
            raise absent[name]
        tensor = tensors.get(name)
        if tensor is None and stored.optional:
            continue
        if tensor is None:
            unknown = [other for other in tensors if other not in expected and not _HARMLESS.search(other)]
            raise ModelError(str(folder), _missing_message(name, unknown), item=name)
        if tensor.shape not in stored.shapes:
            message = f"has shape {list(tensor.shape)}, the model needs {list(stored.shapes[0])}"
            raise ModelError(str(tensor.path), message, item=name)
        if tensor.dtype not in stored.dtypes:
            message = f"is of type {tensor.dtype}; supported are {', '.join(stored.dtypes)}"
            raise ModelError(str(tensor.path), message, item=name)
    known = expected.keys() | set(also)
    extra = [name for name in tensors if name not in known and not _HARMLESS.search(name)]
    if extra:
        _log.warning("%s: %d tensors are not used, e.g. %s", folder, len(extra), ", ".join(extra[:3]))
    if absent:
        message = "%s: %d tensors of the index are not there, e.g. %s; the model does without"
        _log.warning(message, folder, len(absent), ", ".join(list(absent)[:3]))
    found = [tensors[name] for name in known if name in tensors]
    return {tensor.name: tensor for tensor in sorted(found, key=lambda one: (one.path.name, one.offset))}


_Headers: TypeAlias = "tuple[dict[str, SafetensorsTensor], dict[str, ModelError]]"
"""Tensors by their names, and what is wrong where the index has one that is not there."""


def _read_headers(folder: Path) -> _Headers:
    if (folder / _INDEX).is_file():
        return _read_sharded(folder)
    single = _single_file(folder)
    if single is not None:
        return read_safetensors(single), {}
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        message = "pickled weights are never loaded, because reading them runs code; convert the model to safetensors"
        raise ModelError(str(folder / pickled[0]), message)
    raise ModelError(str(folder), f"has neither {_SINGLE} nor {_INDEX}, nor one other file of safetensors")


def _single_file(folder: Path) -> Path | None:
    """All of a small model; older quantisers call it gptq_model-4bit-128g.safetensors and the like."""
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE
    others = [path for path in folder.glob("*.safetensors") if path.is_file()]
    return others[0] if len(others) == 1 else None


def _read_sharded(folder: Path) -> _Headers:
    """What else the index says (total_size) is not looked at: every shard's header accounts for all of its bytes."""
    index_path = folder / _INDEX
    weight_map = read_json_object(index_path, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(str(index_path), "is missing or empty", item="weight_map")
    shards: dict[str, dict[str, SafetensorsTensor] | None] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    absent: dict[str, ModelError] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
            raise ModelError(
                str(index_path), f"{str(file_name)[:80]!r} is no safetensors file of this folder", item=name
            )
        if file_name not in shards:
            path = folder / file_name
            shards[file_name] = read_safetensors(path) if path.is_file() else None
        shard = shards[file_name]
        if shard is None:
            message = f"is in {file_name}, which is missing; fetch it again"
            absent[name] = ModelError(str(index_path), message, item=name)
        elif name not in shard:
            message = f"this tensor is missing; {_INDEX} says it is here"
            absent[name] = ModelError(str(folder / file_name), message, item=name)
        else:
            tensors[name] = shard[name]
    return tensors, absent


def _missing_message(name: str, unknown: Sequence[str]) -> str:
    """unknown: tensors that the model has no use for."""
    if name == "lm_head.weight":
        return "this tensor is missing, and config.json does not say that it is tied (tie_word_embeddings)"
    if unknown:
        return (
            "this tensor is missing; the checkpoint is incomplete, or calls its tensors by names that are not "
            f"supported, e.g. {unknown[0][:120]}"
        )
    return "this tensor is missing; the checkpoint is incomplete"
