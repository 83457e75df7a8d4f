"""Weights that stay as a GGUF file has quantised them, each part in a type of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from oneloop.formats.ggml_types import GGML_TYPES
from oneloop.formats.quantization.gguf import FORMS
from oneloop.quant.base import Incoming
from oneloop.quant.packed import Packed
from oneloop.quant.verdicts import expect_finite
from oneloop_kernels.ops.packed_linear.gguf import numbers_of, sample_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.gguf import GgufScheme
    from oneloop.quant.base import Target
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall
    from oneloop_kernels.ops.packed_linear.packing import Numbers


class GgufWeight:
    """See StoredWeight. Parts of types that are not packed are dequantised while they are loaded."""

    __slots__ = ("_in_size", "_parts", "_scheme", "kept")

    def __init__(
        self,
        scheme: GgufScheme,
        in_size: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: checkpoint name prefix → output size. dtype: of the activations, of 16 bits."""
        self._scheme, self._in_size, self._parts = scheme, in_size, dict(parts)
        self.kept = Packed(tuple(parts.values()), dtype=dtype, device=device)

    @property
    def matrix(self) -> torch.Tensor:
        """See StoredWeight."""
        return self.kept.matrix

    @property
    def is_plain(self) -> bool:
        """See StoredWeight."""
        return False

    def targets(self) -> dict[str, Target]:
        """See StoredWeight. A part of a packed type comes as the bytes of its rows."""
        targets: dict[str, Target] = {}
        blocks = {kind.name: kind for kind in GGML_TYPES.values()}
        for index, (name, size) in enumerate(self._parts.items()):
            kind, shape, dtype = self._scheme.types[index], (size, self._in_size), self.matrix.dtype
            if kind in FORMS:
                shape = (size, self._in_size // blocks[kind].block_size * blocks[kind].block_bytes)
                dtype = torch.uint8
            key, device = f"{name}.weight", self.matrix.device
            sample = partial(sample_blocks, kind, *shape, device) if kind in FORMS else None
            targets[key] = Incoming(shape, dtype, device, partial(self._take, key, index, kind), sample)
        return targets

    def joint_call(self, call: LinearCall) -> LinearCall | PackedCall | None:
        """See StoredWeight."""
        return self.kept.joint_call(call)

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See StoredWeight."""
        return self.kept.multiply(call)

    def _take(self, name: str, index: int, kind: str, values: torch.Tensor) -> None:
        packed = kind in FORMS
        self.kept.put(index, read_blocks(name, kind, values, self.matrix.dtype) if packed else values)


def read_blocks(tensor: str, kind: str, blocks: torch.Tensor, dtype: torch.dtype) -> Numbers:
    """As numbers_of, of a tensor whose scales and offsets must be numbers as they are kept: in dtype."""
    numbers = numbers_of(kind, blocks)
    expect_finite(tensor, numbers.scales.to(dtype))
    if numbers.shifts is not None:
        expect_finite(tensor, numbers.shifts.to(dtype))
    return numbers
