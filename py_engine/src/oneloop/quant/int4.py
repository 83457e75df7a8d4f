"""Weights of 4 bits as AWQ, GPTQ and compressed-tensors store them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop.errors import ModelError
from oneloop.quant.base import Incoming
from oneloop.quant.packed import Packed, WrittenOut, packs
from oneloop_kernels.ops.packed_linear import checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.int4 import Int4Scheme
    from oneloop.quant.base import Target
    from oneloop.quant.packed import Kept
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall
    from oneloop_kernels.ops.packed_linear.packing import Numbers

_SCALES: Final = ("scales", "weight_scale")
_GROUPS: Final = ("g_idx", "weight_g_idx")


class Int4Weight:
    """See StoredWeight. A part is read when all of its tensors have come."""

    __slots__ = ("_dtype", "_in_size", "_names", "_scheme", "_sizes", "_waiting", "kept")

    def __init__(
        self,
        scheme: Int4Scheme,
        in_size: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: checkpoint name prefix → output size. dtype: of the activations."""
        self._scheme, self._in_size, self._dtype = scheme, in_size, dtype
        self._names, self._sizes = tuple(parts), tuple(parts.values())
        self._waiting: list[dict[str, torch.Tensor]] = [{} for _ in parts]
        self.kept: Kept
        if packs(device, dtype) and scheme.form.is_packable(in_size):
            self.kept = Packed(self._sizes, dtype=dtype, device=device)
        else:
            self.kept = WrittenOut(self._sizes, in_size, dtype=dtype, device=device)

    @property
    def matrix(self) -> torch.Tensor:
        """See StoredWeight."""
        return self.kept.matrix

    @property
    def is_plain(self) -> bool:
        """See StoredWeight."""
        return self.kept.is_plain

    def targets(self) -> dict[str, Target]:
        """See StoredWeight."""
        targets: dict[str, Target] = {}
        device = self.matrix.device
        for index, (name, size) in enumerate(zip(self._names, self._sizes, strict=True)):
            for part, stored in self._scheme.tensors(size, self._in_size).items():
                targets[f"{name}.{part}"] = Incoming(
                    stored.shapes[0],
                    self._dtype if part in _SCALES else torch.int32,
                    device,
                    partial(self._take, index, part),
                    self._groups if part in _GROUPS else None,
                )
        return targets

    def joint_call(self, call: LinearCall) -> LinearCall | PackedCall | None:
        """See StoredWeight."""
        return self.kept.joint_call(call)

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See StoredWeight."""
        return self.kept.multiply(call)

    @property
    def _group_size(self) -> int:
        return self._in_size if self._scheme.group_size is None else self._scheme.group_size

    def _groups(self) -> torch.Tensor:
        """The group of each input, where they follow one another."""
        inputs = torch.arange(self._in_size, dtype=torch.int32, device=self.matrix.device)
        return inputs // self._group_size

    def _take(self, index: int, part: str, values: torch.Tensor) -> None:
        waiting = self._waiting[index]
        waiting[part] = values
        if len(waiting) < len(self._scheme.tensors(self._sizes[index], self._in_size)):
            return
        self._waiting[index] = {}
        try:
            numbers = self._numbers(waiting)
        except ValueError as error:
            raise ModelError(self._names[index], str(error), item="g_idx") from error
        self.kept.put(index, numbers)

    def _numbers(self, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        size = self._group_size
        if self._scheme.layout == "awq":
            return checkpoint.awq(tensors["qweight"], tensors["qzeros"], tensors["scales"], group_size=size)
        if self._scheme.layout == "gptq":
            return checkpoint.gptq(
                tensors["qweight"],
                tensors["qzeros"] if self._scheme.zero_points else None,
                tensors["scales"],
                tensors.get("g_idx"),
                bits=4,
                group_size=size,
                zeros_less_one=self._scheme.zeros_less_one,
            )
        return checkpoint.compressed(
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"),
            bits=4,
            group_size=size,
            columns=self._in_size,
        )
