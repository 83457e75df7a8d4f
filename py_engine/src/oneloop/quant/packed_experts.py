"""Experts whose weights are of a few bits: kept packed where there are kernels for that, else as what they mean."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from oneloop.formats.ggml_types import GGML_TYPES
from oneloop.formats.quantization.packed import halves_of
from oneloop.quant.base import Incoming
from oneloop.quant.gguf import read_blocks
from oneloop.quant.int4 import Int4Parts, groups_name
from oneloop.quant.packed import packs
from oneloop.quant.verdicts import expect
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.packed_linear.gguf import sample_blocks
from oneloop_kernels.ops.packed_linear.packing import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.formats.quantization.int4 import Int4Scheme
    from oneloop.formats.quantization.packed import Form
    from oneloop.quant.base import Target
    from oneloop_kernels.ops.packed_linear import Shift
    from oneloop_kernels.ops.packed_linear.packing import Numbers


class _Kept(Protocol):
    """What is made of the parts of all experts, which come one by one, in any order."""

    @property
    def weight(self) -> PackedStack | torch.Tensor:
        """As StoredExperts.weight."""

    def put(self, expert: int, part: int, numbers: Numbers) -> None:
        """A part of an expert."""


class _Packed:
    """See _Kept. Of parts that are not a gate and what it is for there may be one."""

    __slots__ = ("_first", "_groups", "_names", "weight")

    def __init__(
        self,
        form: Form,
        shift: Shift,
        in_size: int,
        experts: Sequence[Mapping[str, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        groups: str = "",
    ) -> None:
        """experts: see quant.experts.stored_experts. shift: what kind of shifts the form has. groups: the last part of
        the name of the tensor that tells the groups of inputs."""
        sizes = tuple(experts[0].values())
        assert len(sizes) == halves_of(sizes)
        self._names, self._groups = [tuple(parts) for parts in experts], groups
        self._first: dict[int, torch.Tensor] = {}
        self.weight = PackedStack.empty(
            len(experts),
            sum(sizes),
            in_size,
            halves=len(sizes),
            bits=form.bits,
            shift=shift if form.shifts else "none",
            group_size=form.group_size or in_size,
            ordered=form.ordered,
            dtype=dtype,
            device=device,
        )

    def put(self, expert: int, part: int, numbers: Numbers) -> None:
        """See _Kept. Expects an expert's parts to have their inputs in one order (quant.verdicts)."""
        if numbers.order is not None and len(self._names[expert]) > 1:
            first = self._first.pop(expert, None)
            if first is None:
                self._first[expert] = numbers.order
            else:
                message = (
                    "puts inputs into other groups than what is computed together with it: "
                    f"{self._names[expert][1 - part]}; take a checkpoint without desc_act (actorder)"
                )
                same = (first == numbers.order).all()
                expect(same, f"{self._names[expert][part]}.{self._groups}", message)
        self.weight.put(expert, numbers, part)


class _WrittenOut:
    """See _Kept."""

    __slots__ = ("_parts", "weight")

    def __init__(
        self, in_size: int, experts: Sequence[Mapping[str, int]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See quant.experts.stored_experts."""
        sizes = list(experts[0].values())
        self.weight = torch.empty(len(experts), sum(sizes), in_size, dtype=dtype, device=device)
        self._parts = torch.split(self.weight, sizes, dim=1)

    def put(self, expert: int, part: int, numbers: Numbers) -> None:
        """See _Kept."""
        self._parts[part][expert].copy_(plain(numbers))


class Int4Experts:
    """See StoredExperts. As AWQ, GPTQ and compressed-tensors store them."""

    __slots__ = ("_experts", "_kept")

    def __init__(
        self,
        scheme: Int4Scheme,
        in_size: int,
        experts: Sequence[Mapping[str, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """See quant.experts.stored_experts."""
        form = scheme.expert_form(len(experts[0]), in_size)
        self._kept: _Kept
        if packs(device, dtype) and form is not None:
            groups = groups_name(scheme)
            self._kept = _Packed(form, "zero", in_size, experts, dtype=dtype, device=device, groups=groups)
        else:
            self._kept = _WrittenOut(in_size, experts, dtype=dtype, device=device)
        self._experts = tuple(
            Int4Parts(scheme, in_size, parts, partial(self._kept.put, expert), dtype=dtype, device=device)
            for expert, parts in enumerate(experts)
        )

    @property
    def weight(self) -> PackedStack | torch.Tensor:
        """See StoredExperts."""
        return self._kept.weight

    def targets(self) -> dict[str, Target]:
        """See StoredExperts."""
        return {name: target for one in self._experts for name, target in one.targets().items()}


class GgufExperts:
    """See StoredExperts. As a GGUF file has them, all parts of one type that is kept packed."""

    __slots__ = ("_experts", "_in_size", "_kind", "weight")

    def __init__(
        self,
        kind: str,
        form: Form,
        in_size: int,
        experts: Sequence[Mapping[str, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """kind: GGUF's name of the type. See quant.experts.stored_experts."""
        self._kind, self._in_size, self._experts = kind, in_size, tuple(experts)
        self.weight = _Packed(form, "offset", in_size, experts, dtype=dtype, device=device).weight

    def targets(self) -> dict[str, Target]:
        """See StoredExperts. A part comes as the bytes of its rows."""
        (kind,) = (one for one in GGML_TYPES.values() if one.name == self._kind)
        row_bytes, device = self._in_size // kind.block_size * kind.block_bytes, self.weight.words.device
        targets: dict[str, Target] = {}
        for expert, parts in enumerate(self._experts):
            for part, (name, size) in enumerate(parts.items()):
                key, shape = f"{name}.weight", (size, row_bytes)
                take = partial(self._take, key, expert, part)
                sample = partial(sample_blocks, self._kind, size, row_bytes, device)
                targets[key] = Incoming(shape, torch.uint8, device, take, sample)
        return targets

    def _take(self, name: str, expert: int, part: int, blocks: torch.Tensor) -> None:
        self.weight.put(expert, read_blocks(name, self._kind, blocks, self.weight.dtype), part)
