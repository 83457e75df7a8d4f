"""Weights of 4 bits as AWQ, GPTQ and compressed-tensors store them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop.formats.quantization.int4 import MIDDLE
from oneloop.quant.base import Incoming
from oneloop.quant.packed import Packed, WrittenOut, packs
from oneloop.quant.verdicts import expect, expect_finite
from oneloop_kernels.ops.packed_linear import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oneloop.formats.quantization.int4 import Int4Scheme
    from oneloop.quant.base import Target
    from oneloop.quant.packed import Kept
    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall
    from oneloop_kernels.ops.packed_linear.packing import Numbers

_SCALES: Final = ("scales", "weight_scale")
_GROUPS: Final = ("g_idx", "weight_g_idx")
_ZEROS: Final = "qzeros"


def groups_name(scheme: Int4Scheme) -> str:
    """Last part of the name of the tensor that tells the groups of inputs."""
    return "weight_g_idx" if scheme.layout == "compressed-tensors" else "g_idx"


class Int4Parts:
    """Parts that are computed as one map, to be read: each when all of its tensors have come.

    put: is given a part's index and its numbers.
    """

    __slots__ = ("_device", "_dtype", "_in_size", "_names", "_put", "_scheme", "_sizes", "_waiting")

    def __init__(
        self,
        scheme: Int4Scheme,
        in_size: int,
        parts: Mapping[str, int],
        put: Callable[[int, Numbers], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: checkpoint name prefix → output size. dtype: of the scales."""
        self._scheme, self._in_size, self._dtype, self._device = scheme, in_size, dtype, device
        self._names, self._sizes = tuple(parts), tuple(parts.values())
        self._put = put
        self._waiting: list[dict[str, torch.Tensor]] = [{} for _ in parts]

    def targets(self) -> dict[str, Target]:
        """See StoredWeight."""
        targets: dict[str, Target] = {}
        for index, (name, size) in enumerate(zip(self._names, self._sizes, strict=True)):
            for part, stored in self._scheme.tensors(size, self._in_size).items():
                shape = stored.shapes[0]
                take = self._check_order if stored.optional else self._take
                targets[f"{name}.{part}"] = Incoming(
                    shape,
                    self._dtype if part in _SCALES else torch.int32,
                    self._device,
                    partial(take, index, part),
                    self._sample_of(part, shape),
                    optional=stored.optional,
                )
        return targets

    @property
    def _group_size(self) -> int:
        return self._in_size if self._scheme.group_size is None else self._scheme.group_size

    def _sample_of(self, part: str, shape: tuple[int, ...]) -> Callable[[], torch.Tensor] | None:
        """For dummy weights: what the other tensors leave no choice about."""
        if part in _GROUPS:
            return self._groups
        if part == _ZEROS and not self._scheme.zero_points:
            word = self._scheme.word_of(MIDDLE)
            return partial(torch.full, shape, word, dtype=torch.int32, device=self._device)
        return None

    def _groups(self) -> torch.Tensor:
        """The group of each input, where they follow one another."""
        inputs = torch.arange(self._in_size, dtype=torch.int32, device=self._device)
        return inputs // self._group_size

    def _check_order(self, index: int, part: str, values: torch.Tensor) -> None:
        """A tensor that says which groups inputs belong to, where the settings say that they follow one another."""
        message = (
            "groups do not follow one another, as config.json says; set desc_act (actorder) to what made them"
        )
        expect((values == self._groups()).all(), f"{self._names[index]}.{part}", message)

    def _take(self, index: int, part: str, values: torch.Tensor) -> None:
        waiting, name = self._waiting[index], self._names[index]
        if part in _SCALES:
            expect_finite(f"{name}.{part}", values)
        if part == _ZEROS and not self._scheme.zero_points:
            self._expect_middle(f"{name}.{part}", values)
        if part in _GROUPS:
            message = f"groups must have {self._group_size} inputs each, as group_size in config.json says"
            expect(checkpoint.are_whole(values, self._group_size), f"{name}.{part}", message)
        waiting[part] = values
        stored = self._scheme.tensors(self._sizes[index], self._in_size).values()
        if len(waiting) < sum(not tensor.optional for tensor in stored):
            return
        self._waiting[index] = {}
        self._put(index, self._numbers(waiting))

    def _expect_middle(self, tensor: str, zeros: torch.Tensor) -> None:
        """GPTQ's zeros, where they are not used because all of them are said to be the middle."""
        message = f"not all zeros are {MIDDLE}, as sym in config.json says; set it to false"
        expect((zeros == self._scheme.word_of(MIDDLE)).all(), tensor, message)

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


class Int4Weight:
    """See StoredWeight."""

    __slots__ = ("_parts", "kept")

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
        sizes = tuple(parts.values())
        self.kept: Kept
        if packs(device, dtype) and scheme.form.is_packable(in_size):
            self.kept = Packed(sizes, dtype=dtype, device=device)
        else:
            self.kept = WrittenOut(sizes, in_size, dtype=dtype, device=device)
        self._parts = Int4Parts(scheme, in_size, parts, self.kept.put, dtype=dtype, device=device)

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
        return self._parts.targets()

    def joint_call(self, call: LinearCall) -> LinearCall | PackedCall | None:
        """See StoredWeight."""
        return self.kept.joint_call(call)

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See StoredWeight."""
        return self.kept.multiply(call)
