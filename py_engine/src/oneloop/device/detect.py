"""Which device a setting means. No torch: importing it takes seconds, and other settings' defaults wait for this."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

DeviceKind = Literal["cuda", "cpu"]
DeviceSetting = Literal["auto", "cuda", "cpu"]

_DEVICE_FILES: Final = ("nvidia[0-9]*", "dxg")
"""One per GPU on Linux; the one of Linux under Windows."""
_BUILT_WITHOUT_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*None\s*$", re.MULTILINE)


def resolve_device(setting: DeviceSetting) -> DeviceKind:
    """The device that a setting means here. One that was asked for by name is not questioned."""
    if setting != "auto":
        return setting
    return "cuda" if sees_gpu() and torch_has_cuda() else "cpu"


def sees_gpu(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether this process may use an NVIDIA GPU: a device file is there, and CUDA_VISIBLE_DEVICES hides not all."""
    if visible_devices(environment) == ():
        return False
    return any(True for pattern in _DEVICE_FILES for _ in devices.glob(pattern))


def visible_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Entries of CUDA_VISIBLE_DEVICES, numbers or UUIDs, up to the first that is none; None where it is not set."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries = []
    for entry in value.split(","):
        name = entry.strip()
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            break
        entries.append(name)
    return tuple(entries)


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, from the file that says so. True where that cannot be read."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        return _BUILT_WITHOUT_CUDA.search(Path(found.origin).with_name("version.py").read_text()) is None
    except OSError:
        return True
