"""safetensors headers: hostile files are refused by name, in bounded time and memory (B-15, T24)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from oneloop.errors import ModelError
from oneloop.formats.safetensors import ITEM_BYTES, read_safetensors


def entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    }


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

HEADERS: dict[str, tuple[Any, str, str]] = {
    # name: (kit → bytes, item named, words of the message)
    "empty": (lambda k: b"", "", "too short"),
    "7 bytes": (lambda k: bytes(7), "", "too short"),
    "length 0": (lambda k: k.safetensors(b"{}", length=0), "header length", "0 bytes"),
    "length past the end": (lambda k: k.safetensors(b"{}", length=3), "header length", "truncated"),
    "length 2^63": (lambda k: k.safetensors(b"{}", length=2**63), "header length", "truncated"),
    "length 2^64-1": (lambda k: k.safetensors(b"{}", length=2**64 - 1), "header length", "truncated"),
    "header of 17 MiB": (lambda k: k.safetensors(b" " * (17 << 20)), "header length", "at most"),
    "no JSON": (lambda k: k.safetensors(b"{nope}"), "header", "JSON"),
    "no object": (lambda k: k.safetensors(b"[1]"), "header", "object"),
    "not UTF-8": (lambda k: k.safetensors(b'{"\xff": 1}'), "header", "UTF-8"),
    "depth 10^5": (lambda k: k.safetensors(DEEP), "header", "deep"),
    "million entries": (
        lambda k: k.safetensors(b'{"a":[' + b"0," * 1_000_000 + b"0]}"),
        "header",
        "more entries|entries",
    ),
    "duplicate names": (lambda k: k.safetensors(b'{"a": 1, "a": 2}'), "a", "twice"),
    "entry no object": (lambda k: k.safetensors({"a": 3}), "a", "object"),
    "no dtype": (lambda k: k.safetensors({"a": {"shape": [], "data_offsets": [0, 0]}}), "a", "dtype"),
    "unknown dtype": (lambda k: k.safetensors({"a": entry(0, 8, dtype="F31")}, data=8), "a", "F31"),
    "dtype a number": (lambda k: k.safetensors({"a": entry(0, 8, dtype=5)}, data=8), "a", "dtype"),
    "shape a number": (lambda k: k.safetensors({"a": entry(0, 8, shape=2)}, data=8), "a", "shape"),
    "negative shape": (lambda k: k.safetensors({"a": entry(0, 8, (-2,))}, data=8), "a", "whole numbers"),
    "fractional shape": (lambda k: k.safetensors({"a": entry(0, 8, (2.0,))}, data=8), "a", "whole numbers"),
    "true as a shape": (lambda k: k.safetensors({"a": entry(0, 4, (True,))}, data=4), "a", "whole numbers"),
    "9 dimensions": (lambda k: k.safetensors({"a": entry(0, 4, (1,) * 9)}, data=4), "a", "9 dimensions"),
    "shape product 2^120": (
        lambda k: k.safetensors({"a": entry(0, 8, (2**60, 2**60))}, data=8),
        "a",
        "needs",
    ),
    "wrong size": (lambda k: k.safetensors({"a": entry(0, 9)}, data=9), "a", "needs 8 bytes"),
    "end before begin": (lambda k: k.safetensors({"a": entry(8, 0)}, data=8), "a", "no range"),
    "three offsets": (
        lambda k: k.safetensors({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4, 8]}}, data=8),
        "a",
        "no range",
    ),
    "offset 2^63": (lambda k: k.safetensors({"a": entry(2**63, 2**63 + 8)}, data=8), "a", "whole numbers"),
    "overlap": (lambda k: k.safetensors({"a": entry(0, 8), "b": entry(4, 12)}, data=12), "b", "overlaps"),
    "gap": (lambda k: k.safetensors({"a": entry(0, 8), "b": entry(12, 20)}, data=20), "b", "gap"),
    "gap at the start": (lambda k: k.safetensors({"a": entry(4, 12)}, data=12), "a", "gap"),
    "past the end": (lambda k: k.safetensors({"a": entry(0, 8)}, data=7), "a", "truncated"),
    "data of nobody": (lambda k: k.safetensors({"a": entry(0, 8)}, data=9), "", "belong to no tensor"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused(name: str, kit: Any, write: Any) -> None:
    make, item, message = HEADERS[name]
    path = write(make(kit), "model.safetensors")
    with kit.bounded(), pytest.raises(ModelError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert not item or caught.value.item == item
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_legal_file_equals_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones((), dtype=np.float16),
        "empty": np.zeros((0, 4), dtype=np.int64),
        "c": np.arange(3, dtype=np.uint8),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    found = read_safetensors(path)
    assert {name: (tensor.shape, tensor.num_bytes) for name, tensor in found.items()} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    content = path.read_bytes()
    for name, tensor in found.items():
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == arrays[name].tobytes()
        assert ITEM_BYTES[tensor.dtype] == arrays[name].itemsize


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {f"t{i}": np.ones((4, 5), dtype=np.float32) for i in range(6)}
    content = safetensors.numpy.save(arrays)
    source = random.Random(0)
    for _ in range(100):
        path.write_bytes(content[: source.randrange(len(content))])
        with pytest.raises(ModelError, match=str(path)):
            read_safetensors(path)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_headers_never_crash(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    content = safetensors.numpy.save({f"t{i}": np.ones((4, 5), dtype=np.float32) for i in range(6)})
    length = int.from_bytes(content[:8], "little")
    path = tmp_path / "model.safetensors"
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(8 + length)] = source.randrange(256)
        path.write_bytes(damaged)
        try:
            read_safetensors(path)
        except ModelError:
            refused += 1
    assert refused > 100


def test_names_are_shortened_in_errors(kit: Any, write: Any) -> None:
    path = write(kit.safetensors(json.dumps({"n" * 100_000: 1}).encode()), "model.safetensors")
    with pytest.raises(ModelError) as caught:
        read_safetensors(path)
    assert len(str(caught.value)) < 1000
