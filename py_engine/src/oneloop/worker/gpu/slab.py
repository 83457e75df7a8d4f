"""Slabs as tensors: the ring in pinned host memory that the core writes, and the device's copy that kernels read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_core import SlabLayout

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "i32": torch.int32,
    "i64": torch.int64,
    "f32": torch.float32,
}


def slab_fields(storage: torch.Tensor, layout: SlabLayout) -> dict[str, torch.Tensor]:
    """The fields of a slab by name, each one-dimensional and of its full length. storage: [layout.num_bytes] uint8."""
    fields = {}
    for field in layout.fields:
        dtype = _DTYPES[field.dtype]
        end = field.offset + field.length * dtype.itemsize
        fields[field.name] = storage[field.offset : end].view(dtype)
    return fields


class DeviceSlab:
    """One buffer on the device that each step is copied into; its addresses never change, so graphs may read it.

    fields: the slab's fields by name (docs/architecture.md). What lies beyond the counts of the header is left from
    earlier steps: every reader looks at the counts first. header_index: where an entry stands in the field `header`.
    """

    __slots__ = ("fields", "header_index", "storage")

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self.storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.fields = slab_fields(self.storage, layout)
        self.header_index: dict[str, int] = dict(layout.header)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The field of that name."""
        return self.fields[name]


class HostSlab:
    """One slab of the ring, in memory that the device reads and writes by itself (pinned where there is a GPU)."""

    __slots__ = ("buffer", "fields", "storage")

    def __init__(self, layout: SlabLayout, *, pinned: bool) -> None:
        self.storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.fields = slab_fields(self.storage, layout)
        self.buffer = memoryview(self.storage.numpy())  # type: ignore[arg-type]  # arrays are buffers
