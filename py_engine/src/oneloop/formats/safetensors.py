"""safetensors header reader: every length and offset is checked against the file. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

from oneloop.errors import ModelError
from oneloop.formats.json_file import parse_json_object

_MAX_HEADER_BYTES = 16 << 20
_MAX_VALUES = 1 << 19
"""Values in a header's JSON: bounds what parsing costs in memory."""
_MAX_DIMS = 8

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Element types of the format and their sizes in bytes."""

FLOATS: Final = ("F32", "F16", "BF16", "F64")
"""Those of plain weights."""


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where one tensor's data lies."""

    name: str
    path: Path
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Tensors of one file, in the order of their data.

    ModelError, naming the file and the tensor, for anything malformed, oversized or truncated: data that overlaps,
    leaves gaps, is larger than the file or does not fit its shape.
    """
    header, base, size = _read_header(path)
    tensors: dict[str, SafetensorsTensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(path, name, entry, base)
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = base
    for tensor in ordered:
        if tensor.offset < end:
            _fail(path, tensor.name, "overlaps the tensor before it")
        if tensor.offset > end:
            _fail(path, tensor.name, f"leaves a gap of {tensor.offset - end} bytes before it")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            _fail(path, tensor.name, f"ends at byte {end}, the file at {size}: truncated? fetch it again")
    if end != size:
        raise ModelError(str(path), f"has {size - end} bytes that belong to no tensor")
    return {tensor.name: tensor for tensor in ordered}


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Parsed header, where the data begins, size of the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size < 8:
                raise ModelError(
                    str(path), f"has {size} bytes: too short for a safetensors file; fetch it again"
                )
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                message = f"claims a header of {length} bytes, the file has {size}: truncated or no safetensors file"
                raise ModelError(str(path), message, item="header length")
            if length > _MAX_HEADER_BYTES:
                message = f"claims {length} bytes, at most {_MAX_HEADER_BYTES} are allowed"
                raise ModelError(str(path), message, item="header length")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror or error}") from error
    if raw.count(b",") > _MAX_VALUES:
        raise ModelError(str(path), "has more entries than any known model", item="header")
    return parse_json_object(raw, str(path), item="header"), 8 + length, size


def _tensor(path: Path, name: str, entry: Any, base: int) -> SafetensorsTensor:
    if not isinstance(entry, dict):
        _fail(path, name, "its header entry is not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _fail(path, name, f"unknown dtype {str(dtype)[:40]!r}")
    shape = _whole_numbers(path, name, entry, "shape")
    offsets = _whole_numbers(path, name, entry, "data_offsets")
    if len(shape) > _MAX_DIMS:
        _fail(path, name, f"has {len(shape)} dimensions, at most {_MAX_DIMS} are allowed")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        _fail(path, name, f"data_offsets {str(offsets)[:60]} are no range")
    num_bytes = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        _fail(
            path,
            name,
            f"{dtype} {list(shape)} needs {num_bytes} bytes, its range has {offsets[1] - offsets[0]}",
        )
    return SafetensorsTensor(name, path, dtype, tuple(shape), base + offsets[0], num_bytes)


def _whole_numbers(path: Path, name: str, entry: dict[str, Any], key: str) -> list[int]:
    values = entry.get(key)
    if not isinstance(values, list):
        _fail(path, name, f"{key} is missing or no list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            _fail(path, name, f"{key} holds something else than whole numbers")
    return values


def _fail(path: Path, name: str, message: str) -> NoReturn:
    raise ModelError(str(path), message, item=name if len(name) <= 120 else name[:120] + "…")
