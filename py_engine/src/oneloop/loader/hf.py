"""safetensors checkpoints → weights: one file or shards; converted to the parameters' type while they are copied."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from oneloop.errors import ModelError
from oneloop.formats.json_file import read_json_object
from oneloop.formats.safetensors import SafetensorsTensor, read_safetensors
from oneloop.loader.progress import Progress, no_progress
from oneloop.loader.reader import RangeReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 64 << 20
_CHUNK_BYTES = 8 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|(^|\.)attention\.(masked_)?bias$")
"""Buffers that old checkpoints carry along."""


def load_hf_weights(
    folder: Path, targets: Mapping[str, torch.Tensor], *, progress: Progress = no_progress
) -> None:
    """Fill every target (Hugging Face tensor name → view of a parameter, any device and float type).

    ModelError names the tensor that is missing, misshapen or of a type that is no float; nothing is read before
    all are checked. Tensors the model has no use for are named in one log line.
    """
    tensors = read_checkpoint(folder)
    _check(folder, tensors, targets)
    order = sorted(targets, key=lambda name: (tensors[name].path.name, tensors[name].offset))
    total = sum(tensors[name].num_bytes for name in targets)
    done = 0
    with ExitStack() as stack:
        readers: dict[Path, RangeReader] = {}
        for name in order:
            tensor = tensors[name]
            if tensor.path not in readers:
                readers[tensor.path] = stack.enter_context(RangeReader(tensor.path))
            _fill(readers[tensor.path], tensor, targets[name])
            done += tensor.num_bytes
            progress("loading weights", done, total)


def read_checkpoint(folder: Path) -> dict[str, SafetensorsTensor]:
    """Headers of the folder's safetensors files. ModelError when there are none, or the index does not fit them."""
    if (folder / _INDEX).is_file():
        return _read_sharded(folder)
    if (folder / _SINGLE).is_file():
        return read_safetensors(folder / _SINGLE)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        message = "pickled weights are never loaded, because reading them runs code; convert the model to safetensors"
        raise ModelError(str(folder / pickled[0]), message)
    raise ModelError(str(folder), f"has neither {_SINGLE} nor {_INDEX}")


def _read_sharded(folder: Path) -> dict[str, SafetensorsTensor]:
    index_path = folder / _INDEX
    index = read_json_object(index_path, max_bytes=_MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(str(index_path), "is missing or empty", item="weight_map")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors: dict[str, SafetensorsTensor] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
            raise ModelError(
                str(index_path), f"{str(file_name)[:80]!r} is no safetensors file of this folder", item=name
            )
        if file_name not in shards:
            if not (folder / file_name).is_file():
                raise ModelError(
                    str(index_path), f"is in {file_name}, which is missing; fetch it again", item=name
                )
            shards[file_name] = read_safetensors(folder / file_name)
        if name not in shards[file_name]:
            raise ModelError(
                str(folder / file_name), f"this tensor is missing; {_INDEX} says it is here", item=name
            )
        tensors[name] = shards[file_name][name]
    _check_total(index_path, index, tensors)
    return tensors


def _check_total(
    index_path: Path, index: Mapping[str, object], tensors: Mapping[str, SafetensorsTensor]
) -> None:
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    if claimed is None:
        return
    actual = sum(tensor.num_bytes for tensor in tensors.values())
    if claimed != actual:
        message = f"says {claimed!r:.40}, the tensors have {actual} bytes; fetch the model again (or delete this entry)"
        raise ModelError(str(index_path), message, item="metadata.total_size")


def _check(
    folder: Path, tensors: Mapping[str, SafetensorsTensor], targets: Mapping[str, torch.Tensor]
) -> None:
    for name, target in targets.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelError(str(folder), _missing_message(name), item=name)
        if tensor.shape != tuple(target.shape):
            message = f"has shape {list(tensor.shape)}, the model needs {list(target.shape)}"
            raise ModelError(str(tensor.path), message, item=name)
        if tensor.dtype not in _DTYPES:
            message = f"is of type {tensor.dtype}; supported are {', '.join(_DTYPES)}"
            raise ModelError(str(tensor.path), message, item=name)
    extra = [name for name in tensors if name not in targets and not _HARMLESS.search(name)]
    if extra:
        _log.warning("%s: %d tensors are not used, e.g. %s", folder, len(extra), ", ".join(extra[:3]))


def _missing_message(name: str) -> str:
    if name == "lm_head.weight":
        return "this tensor is missing, and config.json does not say that it is tied (tie_word_embeddings)"
    return "this tensor is missing; the checkpoint is incomplete"


def _fill(reader: RangeReader, tensor: SafetensorsTensor, target: torch.Tensor) -> None:
    """Read straight into the parameter where type and device allow it, else through a buffer."""
    dtype = _DTYPES[tensor.dtype]
    if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        if tensor.num_bytes:
            reader.read_into(tensor.offset, target.view(-1).view(torch.uint8).numpy())
        return
    if not tensor.shape:
        target.copy_(torch.from_numpy(reader.read(tensor.offset, tensor.num_bytes)).view(dtype)[0])
        return
    row_bytes = tensor.num_bytes // max(tensor.shape[0], 1)
    rows_per_chunk = max(_CHUNK_BYTES // max(row_bytes, 1), 1)
    for start in range(0, tensor.shape[0], rows_per_chunk):
        stop = min(start + rows_per_chunk, tensor.shape[0])
        raw = reader.read(tensor.offset + start * row_bytes, (stop - start) * row_bytes)
        target[start:stop].copy_(torch.from_numpy(raw).view(dtype).view(stop - start, *tensor.shape[1:]))
