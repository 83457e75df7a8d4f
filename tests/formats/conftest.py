"""Raw GGUF and safetensors bytes, as wrong as a test wants them, and a measure of what reading them costs."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
_SCALARS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}

MAX_SECONDS = 5.0
MAX_GROWTH_BYTES = 64 << 20


def gguf_string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(kind: int, value: Any) -> bytes:
    """Type and value; an array's value is (element type, [elements]) or raw bytes after the element type."""
    return struct.pack("<I", kind) + _payload(kind, value)


def _payload(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        element, entries = value
        return struct.pack("<IQ", element, len(entries)) + b"".join(
            _payload(element, entry) for entry in entries
        )
    return struct.pack(_SCALARS[kind], value)


def gguf_tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    header = gguf_string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
    return header + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    keys: Sequence[tuple[str | bytes, int, Any]] = (),
    tensors: Sequence[bytes] = (),
    *,
    data: int = 0,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A whole file: header, padding to the alignment, `data` zero bytes."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(gguf_string(name) + gguf_value(kind, value) for name, kind, value in keys)
    head += b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def safetensors_bytes(header: bytes | dict[str, Any], *, data: int = 0, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def model_keys(**changes: tuple[int, Any] | None) -> list[tuple[str, int, Any]]:
    """The metadata of a tiny llama; `changes` replaces or (None) drops keys, dots written as two underscores."""
    keys: dict[str, tuple[int, Any] | None] = {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (U32, 1),
        "llama.context_length": (U32, 64),
        "llama.embedding_length": (U32, 8),
        "llama.feed_forward_length": (U32, 16),
        "llama.attention.head_count": (U32, 2),
        "llama.attention.head_count_kv": (U32, 1),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b", "c", "d"])),
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return [(name, *value) for name, value in keys.items() if value is not None]


@contextmanager
def bounded() -> Iterator[None]:
    """Fails when the body takes more of the CPU's time, or makes the process grow more, than a refusal may."""
    process = psutil.Process()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process.memory_info().rss
    begin = time.thread_time()
    yield
    seconds = time.thread_time() - begin
    status = Path("/proc/self/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    assert seconds < MAX_SECONDS
    assert peak - before < MAX_GROWTH_BYTES


class Kit:
    """The functions above, for tests that cannot import this file."""

    U32, I32, F32, BOOL, STRING, ARRAY, U64 = U32, I32, F32, BOOL, STRING, ARRAY, U64
    string = staticmethod(gguf_string)
    tensor = staticmethod(gguf_tensor)
    gguf = staticmethod(gguf_bytes)
    safetensors = staticmethod(safetensors_bytes)
    model_keys = staticmethod(model_keys)
    bounded = staticmethod(bounded)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Bytes → path of a file that holds them."""

    def write_file(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write_file
