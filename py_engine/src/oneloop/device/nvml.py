"""What NVML, the driver's management library, says of the GPU that this process would use. Through ctypes: no torch.

Asking it starts no CUDA context. Where the library is missing or refuses, there is no answer.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from oneloop.device.detect import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LIBRARY: Final = "libnvidia-ml.so.1"
_NAME_BYTES: Final = 96
_SUCCESS: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as it is now."""

    name: str
    """The product's, e.g. "NVIDIA H200"."""
    total_bytes: int
    """All of its memory, with what the driver keeps for itself."""
    free_bytes: int


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64))


def first_gpu(environment: Mapping[str, str] = os.environ, library: Any = None) -> Gpu | None:
    """The GPU that CUDA calls number 0, or None. library: NVML's functions; None means the driver's own."""
    visible = visible_devices(environment)
    if visible == ():
        return None
    if library is None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
    with _initialized(library) as ready:
        if not ready:
            return None
        handle = ctypes.c_void_p()
        wanted = visible[0] if visible else "0"
        if wanted.isdecimal():
            status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(wanted)), ctypes.byref(handle))
        else:
            status = library.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(handle))
        return _describe(library, handle) if status == _SUCCESS else None


@contextmanager
def _initialized(library: Any) -> Iterator[bool]:
    """Whether NVML is ready for use within the block."""
    ready = library.nvmlInit_v2() == _SUCCESS
    try:
        yield ready
    finally:
        if ready:
            library.nvmlShutdown()


def _describe(library: Any, handle: ctypes.c_void_p) -> Gpu | None:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    if (
        library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)) != _SUCCESS
        or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != _SUCCESS
    ):
        return None
    return Gpu(name=name.value.decode(errors="replace"), total_bytes=memory.total, free_bytes=memory.free)
