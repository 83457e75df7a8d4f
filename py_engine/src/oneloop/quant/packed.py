"""Weights of a few bits: kept packed where there are kernels for that, else as the plain numbers that they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from oneloop.formats.quantization.packed import halves_of
from oneloop_kernels.ops.linear import LINEAR, LinearCall
from oneloop_kernels.ops.packed_linear import PACKED_LINEAR, PackedCall, PackedWeight
from oneloop_kernels.ops.packed_linear.packing import Numbers, agree, joined, pack, plain
from oneloop_kernels.ops.rms_norm import RMS_NORM
from oneloop_kernels.ops.silu_mul import SILU_MUL
from oneloop_kernels.registry import TRITON

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Kept(Protocol):
    """What is made of the parts of a map, which come one by one, in any order."""

    @property
    def matrix(self) -> torch.Tensor:
        """As StoredWeight.matrix."""

    @property
    def is_plain(self) -> bool:
        """As StoredWeight.is_plain."""

    def put(self, index: int, part: Numbers | torch.Tensor) -> None:
        """A part's numbers, or its plain weight, [size, in_size] of the model's type."""

    def joint_call(self, call: LinearCall) -> LinearCall | PackedCall | None:
        """As StoredWeight.joint_call."""

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """As StoredWeight.multiply."""


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for packed weights: on a GPU, for types of 16 bits."""
    return dtype.itemsize == 2 and PACKED_LINEAR.candidates(device, dtype)[0] == TRITON


class WrittenOut:
    """See Kept. matrix: [out, in], plain."""

    __slots__ = ("_compute", "_parts", "is_plain", "matrix")

    def __init__(
        self, sizes: Sequence[int], in_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """sizes: of the parts' results."""
        self.matrix = torch.empty(sum(sizes), in_size, dtype=dtype, device=device)
        self.is_plain = True
        self._parts = torch.split(self.matrix, list(sizes))
        self._compute = LINEAR.resolve(device, dtype)

    def put(self, index: int, part: Numbers | torch.Tensor) -> None:
        """See Kept."""
        self._parts[index].copy_(plain(part) if isinstance(part, Numbers) else part)

    def joint_call(self, call: LinearCall) -> LinearCall:
        """See Kept."""
        return call

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See Kept."""
        return self._compute(call)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Parts that are computed as one. weight: packed, or plain [rows, in]."""

    start: int
    rows: int
    weight: PackedWeight | torch.Tensor


class Packed:
    """See Kept. matrix: [out, 0]: nobody else can multiply by what stands for it.

    Parts side by side that are of one kind become one packed weight, the others are computed one after the other: a
    GGUF file may have the values' projection in more bits than those of queries and keys.
    """

    __slots__ = (
        "_compute", "_compute_plain", "_dtype", "_norm", "_pieces", "_silu_mul", "_sizes", "_waiting",
        "is_plain", "matrix",
    )  # fmt: skip

    def __init__(self, sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        """sizes: of the parts' results."""
        self.matrix = torch.empty(sum(sizes), 0, dtype=dtype, device=device)
        self.is_plain = False
        self._sizes = tuple(sizes)
        self._dtype = dtype
        self._waiting: dict[int, Numbers | torch.Tensor] = {}
        self._pieces: tuple[_Piece, ...] = ()
        self._compute = PACKED_LINEAR.resolve(device, dtype)
        self._compute_plain = LINEAR.resolve(device, dtype)
        self._norm = RMS_NORM.resolve(device, dtype)
        self._silu_mul = SILU_MUL.resolve(device, dtype)

    def put(self, index: int, part: Numbers | torch.Tensor) -> None:
        """See Kept. The last one is followed by the packing."""
        self._waiting[index] = part
        if len(self._waiting) < len(self._sizes):
            return
        parts = [self._waiting.pop(place) for place in range(len(self._sizes))]
        self._pieces = tuple(self._packed(parts))

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        total = 0
        for piece in self._pieces:
            if isinstance(piece.weight, torch.Tensor):
                total += piece.weight.nbytes
            else:
                order = piece.weight.order
                total += piece.weight.num_bytes + (0 if order is None else order.nbytes)
        return total

    def joint_call(self, call: LinearCall) -> PackedCall | None:
        """See Kept: where all parts are one packed weight."""
        (first, *others) = self._pieces
        if others or not isinstance(first.weight, PackedWeight):
            return None
        return PackedCall(
            call.x,
            first.weight,
            call.bias,
            norm=call.norm,
            gated=call.gated,
            residual=call.residual,
            tickets=call.tickets,
        )

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See Kept."""
        packed = self.joint_call(call)
        if packed is not None:
            return self._compute(packed)
        out = self._all_pieces(call)
        if call.gated:
            out = self._silu_mul(out)
        return out if call.residual is None else call.residual.add_(out)

    def _all_pieces(self, call: LinearCall) -> torch.Tensor:
        """The product and the bias."""
        x = call.x if call.norm is None else self._norm(call.x, call.norm.weight, call.norm.eps)
        out = torch.empty(x.shape[0], sum(self._sizes), dtype=x.dtype, device=x.device)
        for start, rows, weight in ((piece.start, piece.rows, piece.weight) for piece in self._pieces):
            target = out[:, start : start + rows]
            bias = None if call.bias is None else call.bias[start : start + rows]
            if isinstance(weight, torch.Tensor):
                target.copy_(self._compute_plain(LinearCall(x, weight, bias, tickets=call.tickets)))
            else:
                self._compute(PackedCall(x, weight, bias, out=target, tickets=call.tickets))
        return out

    def _packed(self, parts: Sequence[Numbers | torch.Tensor]) -> Iterator[_Piece]:
        """What can be computed as one, joined."""
        start = begin = 0
        for index, part in enumerate(parts):
            following = parts[index + 1] if index + 1 < len(parts) else None
            if isinstance(part, Numbers) and isinstance(following, Numbers) and agree(part, following):
                continue
            if isinstance(part, torch.Tensor) and isinstance(following, torch.Tensor):
                continue
            sizes = self._sizes[begin : index + 1]
            together = parts[begin : index + 1]
            weight: PackedWeight | torch.Tensor
            numbers = [one for one in together if isinstance(one, Numbers)]
            if numbers:
                # A piece of several is computed with its halves apart.
                halves = halves_of(sizes) if len(sizes) == len(parts) else 1
                weight = pack(joined(numbers), self._dtype, halves=halves)
            else:
                weight = torch.cat([one for one in together if isinstance(one, torch.Tensor)])
            yield _Piece(start, sum(sizes), weight)
            start, begin = start + sum(sizes), index + 1
