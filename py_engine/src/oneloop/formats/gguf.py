"""GGUF v2/v3 header reader: every count, length and offset is checked against the file before anything is allocated.

No torch, and not the `gguf` package's reader (it takes seconds). Reads over mmap, so only header pages are touched.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from oneloop.errors import ModelError
from oneloop.formats.ggml_types import GGML_TYPES, GgmlType
from oneloop.formats.gguf_metadata import GgufMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_NAME_BYTES = 65535
_MAX_STRING_BYTES = 16 << 20
_MAX_OBJECTS = 1 << 20
"""Strings and nested arrays of one file: bounds what the header costs in memory and time."""
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAY_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"^(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor's data lies."""

    name: str
    path: Path
    shape: tuple[int, ...]
    """Row-major: the last entry is the contiguous one (the file stores it first)."""
    type: GgmlType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF model (of all its parts, where it is split)."""

    path: Path
    version: int
    metadata: GgufMetadata
    tensors: Mapping[str, GgufTensor]
    """By name, in the order of the data in the file."""


def read_gguf(path: Path) -> GgufFile:
    """Header of a GGUF file; of a split model, of all parts (give the first part).

    ModelError, naming the file and the key or tensor, for anything malformed, oversized, truncated or missing.
    """
    first = _read_part(path)
    count = first.metadata.integer("split.count", 0, 99999, default=0)
    if count <= 1:
        return first
    return _join_parts(first, count)


def _join_parts(first: GgufFile, count: int) -> GgufFile:
    """Headers of parts 2 … count beside the first, merged; their names follow `<prefix>-00002-of-0000N.gguf`."""
    match = _SPLIT_NAME.match(first.path.name)
    number = first.metadata.integer("split.no", 0, count - 1)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise ModelError(
            str(first.path),
            f"is part {number + 1} of {count}, but is not named <name>-{number + 1:05d}-of-{count:05d}.gguf; "
            "give the parts their original names",
            item="split.no",
        )
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    if number != 0:
        message = f"is part {number + 1} of {count}; give the first part, {names[0]}"
        raise ModelError(str(first.path), message, item="split.no")
    tensors = dict(first.tensors)
    for i, name in enumerate(names[1:], start=1):
        part = _read_part(first.path.with_name(name))
        said = (part.metadata.integer("split.no", 0, 99999), part.metadata.integer("split.count", 0, 99999))
        if said != (i, count):
            message = (
                f"says it is part {said[0] + 1} of {said[1]}, not {i + 1} of {count}: the parts are mixed up"
            )
            raise ModelError(str(part.path), message, item="split.no")
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise ModelError(str(part.path), "this tensor is in an earlier part too", item=tensor.name)
            tensors[tensor.name] = tensor
    expected = first.metadata.integer("split.tensors.count", 0, _MAX_TENSORS, default=len(tensors))
    if expected != len(tensors):
        message = f"promises {expected} tensors, the parts hold {len(tensors)}"
        raise ModelError(str(first.path), message, item="split.tensors.count")
    return GgufFile(first.path, first.version, first.metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(_MAGIC) + 4 + 16:
                raise ModelError(str(path), f"has {size} bytes: too short for a GGUF header; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data, size).read()
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """One pass over a header. Positions and lengths are Python ints, so nothing can overflow."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._position = 0
        self._num_objects = 0

    def read(self) -> GgufFile:
        version, num_tensors, num_keys = self._read_counts()
        metadata = self._read_metadata(num_keys)
        alignment = metadata.integer("general.alignment", 0, 1 << 64, default=_DEFAULT_ALIGNMENT)
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(f"{alignment} is no power of two up to {_MAX_ALIGNMENT}", "general.alignment")
        infos = [self._read_tensor_info(i) for i in range(num_tensors)]
        return GgufFile(self._path, version, metadata, self._place_tensors(infos, alignment))

    def _read_counts(self) -> tuple[int, int, int]:
        if self._take(4, "magic") != _MAGIC:
            self._fail("does not begin with 'GGUF': not a GGUF file")
        version = self._u32("version")
        if version not in _SUPPORTED_VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 and version else f"GGUF version {version}"
            self._fail(
                f"{kind} is not supported; convert the model again (version 2 or 3, little-endian)", "version"
            )
        num_tensors = self._u64("tensor count")
        num_keys = self._u64("key count")
        for item, count, minimum, most in (
            ("tensor count", num_tensors, _MIN_TENSOR_BYTES, _MAX_TENSORS),
            ("key count", num_keys, _MIN_KEY_BYTES, _MAX_KEYS),
        ):
            if count > most or count * minimum > self._size - self._position:
                self._fail(f"{count} is more than the file can hold", item)
        return version, num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> GgufMetadata:
        values: dict[str, Any] = {}
        for i in range(num_keys):
            key = self._name(f"key {i}")
            if key in values:
                self._fail("this key appears twice", key)
            values[key] = self._value(self._u32(key), key, 0)
        return GgufMetadata(str(self._path), values)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            self._fail(f"unknown value type {kind}", key)
        (value,) = scalar.unpack(self._take(scalar.size, key))
        if kind == _BOOL:
            if value > 1:
                self._fail(f"a truth value is stored as {value}", key)
            return bool(value)
        return value

    def _array(self, key: str, depth: int) -> Any:
        if depth >= _MAX_ARRAY_DEPTH:
            self._fail(f"arrays are nested deeper than {_MAX_ARRAY_DEPTH}", key)
        kind = self._u32(key)
        count = self._u64(key)
        if kind == _STRING:
            return self._string_array(count, key)
        if kind == _ARRAY:
            self._claim_objects(count, 12, key, cost=16)
            return [self._array(key, depth + 1) for _ in range(count)]
        dtype = _ARRAY_DTYPES.get(kind)
        if dtype is None:
            self._fail(f"unknown array element type {kind}", key)
        values = np.frombuffer(self._take(count * np.dtype(dtype).itemsize, key), dtype=dtype)
        if kind == _BOOL:
            if values.size and values.max() > 1:
                self._fail("a truth value is stored as something else than 0 or 1", key)
            return values.astype(bool)
        return values

    def _string_array(self, count: int, key: str) -> list[str]:
        """The hot loop: vocabularies and merges have 10^5 entries."""
        self._claim_objects(count, 8, key)
        data, size, position, read_length = self._data, self._size, self._position, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = read_length(data, position)
                start = position + 8
                position = start + length
                if length > _MAX_STRING_BYTES or position > size:
                    self._fail(f"entry {len(strings)} claims {length} bytes", key)
                strings.append(str(data[start:position], "utf-8"))
        except struct.error:
            self._fail(f"the file ends inside entry {len(strings)} of {count}: truncated", key)
        except UnicodeDecodeError:
            self._fail(f"entry {len(strings)} is not valid UTF-8", key)
        self._position = position
        return strings

    def _claim_objects(self, count: int, minimum_bytes: int, key: str, *, cost: int = 1) -> None:
        """Before a list of `count` entries is built: can the file hold them, and may a header cost so much."""
        self._num_objects += count * cost
        if count * minimum_bytes > self._size - self._position:
            self._fail(f"an array claims {count} entries: more than the file can hold", key)
        if self._num_objects > _MAX_OBJECTS:
            self._fail(f"an array claims {count} entries: more than any known model has", key)

    def _read_tensor_info(self, index: int) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name = self._name(f"tensor {index}")
        num_dims = self._u32(name)
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"has {num_dims} dimensions, 1 to {_MAX_DIMS} are allowed", name)
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
        type_id = self._u32(name)
        offset = self._u64(name)
        if type_id not in GGML_TYPES:
            self._fail(f"unknown tensor type {type_id}", name)
        return name, dims[::-1], GGML_TYPES[type_id], offset

    def _place_tensors(
        self, infos: list[tuple[str, tuple[int, ...], GgmlType, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Check sizes and offsets; tensors in the order of their data."""
        base = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = base
        for name, shape, kind, relative in sorted(infos, key=lambda info: info[3]):
            if name in tensors:
                self._fail("this tensor appears twice", name)
            if min(shape) < 1 or shape[-1] % kind.block_size:
                self._fail(
                    f"shape {list(shape)} does not fit type {kind.name} (blocks of {kind.block_size})", name
                )
            num_bytes = prod(shape) // kind.block_size * kind.block_bytes
            offset = base + relative
            if relative % alignment:
                self._fail(f"offset {relative} is no multiple of the alignment {alignment}", name)
            if offset + num_bytes > self._size:
                place = f"needs {num_bytes} bytes at {offset}, the file ends at {self._size}"
                self._fail(f"{place}: truncated? fetch it again", name)
            if offset < end:
                self._fail("overlaps the tensor before it", name)
            end = offset + num_bytes
            tensors[name] = GgufTensor(name, self._path, shape, kind, offset, num_bytes)
        return tensors

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if not 1 <= length <= _MAX_NAME_BYTES:
            self._fail(f"its name claims {length} bytes, 1 to {_MAX_NAME_BYTES} are allowed", what)
        return self._text(length, what)

    def _string(self, key: str) -> str:
        length = self._u64(key)
        if length > _MAX_STRING_BYTES:
            self._fail(f"a string claims {length} bytes, at most {_MAX_STRING_BYTES} are allowed", key)
        return self._text(length, key)

    def _text(self, length: int, item: str) -> str:
        try:
            return str(self._take(length, item), "utf-8")
        except UnicodeDecodeError:
            self._fail("is not valid UTF-8", item)

    def _u32(self, item: str) -> int:
        return int(_U32.unpack(self._take(4, item))[0])

    def _u64(self, item: str) -> int:
        return int(_U64.unpack(self._take(8, item))[0])

    def _take(self, length: int, item: str) -> bytes:
        end = self._position + length
        if end > self._size:
            left = self._size - self._position
            self._fail(
                f"needs {length} bytes where {left} are left: truncated or corrupt; fetch it again", item
            )
        data = self._data[self._position : end]
        self._position = end
        return data

    def _fail(self, message: str, item: str | None = None) -> NoReturn:
        shown = item if item is None or len(item) <= 120 else item[:120] + "…"
        raise ModelError(str(self._path), message, item=shown)
