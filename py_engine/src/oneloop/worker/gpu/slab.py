"""The step's slab on the device: a copy of the used prefix, with a typed view per field."""

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


class DeviceSlab:
    """One buffer on the device that each step is copied into; its addresses never change, so graphs may read it.

    fields: the slab's fields by name, each one-dimensional and of its full length (docs/architecture.md). What lies
    beyond the counts of the header is left from earlier steps: every reader looks at the counts first.
    header_index: where an entry stands in the field `header` (int64).
    """

    __slots__ = ("fields", "header_index", "storage")

    def __init__(self, layout: SlabLayout, device: torch.device) -> None:
        self.storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.fields: dict[str, torch.Tensor] = {}
        for field in layout.fields:
            dtype = _DTYPES[field.dtype]
            end = field.offset + field.length * dtype.itemsize
            self.fields[field.name] = self.storage[field.offset : end].view(dtype)
        self.header_index: dict[str, int] = dict(layout.header)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The field of that name."""
        return self.fields[name]
