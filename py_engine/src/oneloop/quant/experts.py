"""How the weights of a layer's experts are stored: one map of all of them, stacked, filled expert by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from oneloop.formats.quantization.fp8 import Fp8Scheme
from oneloop.formats.quantization.int4 import Int4Scheme
from oneloop.quant.fp8 import Fp8Parts, scales_shape
from oneloop.quant.packed import packs
from oneloop.quant.packed_experts import GgufExperts, Int4Experts
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.moe.weights import Fp8Stack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.formats.quantization.gguf import GgufQuantization
    from oneloop.formats.quantization.spec import QuantizationSpec
    from oneloop.quant.base import Target
    from oneloop_kernels.ops.moe.weights import ExpertWeight


class StoredExperts(Protocol):
    """One map of all experts of a layer, uninitialised until it is loaded."""

    @property
    def weight(self) -> ExpertWeight:
        """As ops.moe.Experts has it. The same from the beginning on: the loader fills its tensors."""

    def targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where the loader puts it."""


def stored_experts(
    quantization: QuantizationSpec | GgufQuantization | None,
    in_size: int,
    experts: Sequence[Mapping[str, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> StoredExperts:
    """experts: of each its parts, checkpoint name prefix → output size. ModelError where they are not stored alike."""
    names = [name for parts in experts for name in parts]
    scheme = None if quantization is None else quantization.scheme_of(names)
    if isinstance(scheme, Fp8Scheme):
        return Fp8Experts(scheme, in_size, experts, dtype=dtype, device=device)
    if isinstance(scheme, Int4Scheme):
        return Int4Experts(scheme, in_size, experts, dtype=dtype, device=device)
    if scheme is not None and packs(device, dtype):
        form = scheme.expert_form(len(experts[0]), in_size)
        if form is not None:
            return GgufExperts(scheme.types[0], form, in_size, experts, dtype=dtype, device=device)
    return PlainExperts(in_size, experts, dtype=dtype, device=device)


class PlainExperts:
    """See StoredExperts. Plain numbers of the model's type."""

    __slots__ = ("_experts", "weight")

    def __init__(
        self, in_size: int, experts: Sequence[Mapping[str, int]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See stored_experts."""
        self._experts = tuple(experts)
        rows = sum(experts[0].values())
        self.weight: torch.Tensor = torch.empty(len(experts), rows, in_size, dtype=dtype, device=device)

    def targets(self) -> dict[str, Target]:
        """See StoredExperts."""
        targets: dict[str, Target] = {}
        for parts, rows in zip(self._experts, self.weight, strict=True):
            views = torch.split(rows, list(parts.values()))
            targets |= {f"{name}.weight": view for name, view in zip(parts, views, strict=True)}
        return targets


class Fp8Experts:
    """See StoredExperts. Each expert's part of the stack is filled as a map of its own (quant.fp8)."""

    __slots__ = ("_experts", "weight")

    def __init__(
        self,
        scheme: Fp8Scheme,
        in_size: int,
        experts: Sequence[Mapping[str, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """See stored_experts. dtype: of the activations around the map."""
        sizes = tuple(experts[0].values())
        scales = (len(experts), *scales_shape(scheme, sizes, in_size))
        self.weight = Fp8Stack(
            torch.empty(len(experts), sum(sizes), in_size, dtype=FP8, device=device),
            torch.empty(scales, dtype=torch.float32, device=device),
        )
        self._experts = tuple(
            Fp8Parts(scheme, parts, values, scales, dtype=dtype)
            for parts, values, scales in zip(experts, *self.weight, strict=True)
        )

    def targets(self) -> dict[str, Target]:
        """See StoredExperts."""
        return {name: target for one in self._experts for name, target in one.targets().items()}
