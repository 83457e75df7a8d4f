"""Weights in 8-bit floats, which 8-bit activations are multiplied with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from oneloop.formats.quantization.fp8 import BLOCK, rows_per_scale
from oneloop.quant.base import Incoming
from oneloop.quant.verdicts import expect_finite
from oneloop_kernels.ops.float8 import FP8
from oneloop_kernels.ops.fp8_linear import FP8_LINEAR
from oneloop_kernels.ops.fp8_linear.quantize import quantize_blocks, quantize_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.formats.quantization.fp8 import Fp8Scheme
    from oneloop.quant.base import Target
    from oneloop_kernels.ops.linear import LinearCall


class Fp8Parts:
    """Parts one below the other, to be filled: where a checkpoint's tensors go.

    matrix: e4m3 [out, in]; scales: as ops.fp8_linear has them, one per row or per block.
    """

    __slots__ = ("_dtype", "_parts", "_rows", "_scheme", "matrix", "scales")

    def __init__(
        self,
        scheme: Fp8Scheme,
        parts: Mapping[str, int],
        matrix: torch.Tensor,
        scales: torch.Tensor,
        *,
        dtype: torch.dtype,
    ) -> None:
        """parts: checkpoint name prefix → output size. scales: of the shape of scales_shape(). dtype: of plain numbers
        that become these."""
        self._scheme, self._parts, self._dtype = scheme, dict(parts), dtype
        self.matrix, self.scales = matrix, scales
        self._rows = matrix.shape[0] // scales.shape[0]

    def targets(self) -> dict[str, Target]:
        """See StoredWeight."""
        targets: dict[str, Target] = {}
        start, in_size = 0, self.matrix.shape[1]
        for name, size in self._parts.items():
            rows = self.matrix[start : start + size]
            scales = self.scales[start // self._rows : (start + size) // self._rows]
            for part, stored in self._scheme.tensors(size, in_size).items():
                shape, key = stored.shapes[0], f"{name}.{part}"
                if part != "weight":
                    take = partial(self._take_scales, key, scales)
                    targets[key] = Incoming(shape, torch.float32, scales.device, take)
                elif self._scheme.stored:
                    targets[key] = rows
                else:
                    targets[key] = Incoming(
                        shape, self._dtype, rows.device, partial(self._quantize, key, rows, scales)
                    )
            start += size
        return targets

    def _take_scales(self, name: str, scales: torch.Tensor, stored: torch.Tensor) -> None:
        """A part's scales, as the checkpoint has them, to as many rows of its own as each stands for here."""
        expect_finite(name, stored)
        if self._scheme.scales != "block":
            scales.copy_(stored.reshape(-1).expand_as(scales))
            return
        repeated = stored.repeat_interleave(self._scheme.block_rows // self._rows, dim=0)
        scales.copy_(repeated[: scales.shape[0]])

    def _quantize(self, name: str, rows: torch.Tensor, scales: torch.Tensor, plain: torch.Tensor) -> None:
        """A part that came as plain numbers."""
        if self._scheme.scales == "block":
            quantized, found = quantize_blocks(plain, self._scheme.block_rows)
        else:
            quantized, found = quantize_rows(plain)
        self._take_scales(name, scales, found)
        rows.copy_(quantized)


class Fp8Weight:
    """See StoredWeight. matrix, scales: as Fp8Parts has them."""

    __slots__ = ("_compute", "_parts", "is_plain", "matrix", "scales")

    def __init__(
        self,
        scheme: Fp8Scheme,
        in_size: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: checkpoint name prefix → output size. dtype: of the activations around the map."""
        sizes = tuple(parts.values())
        self.is_plain = False
        self.matrix = torch.empty(sum(sizes), in_size, dtype=FP8, device=device)
        self.scales = torch.empty(scales_shape(scheme, sizes, in_size), dtype=torch.float32, device=device)
        self._parts = Fp8Parts(scheme, parts, self.matrix, self.scales, dtype=dtype)
        self._compute = FP8_LINEAR.resolve(device, dtype)

    def targets(self) -> dict[str, Target]:
        """See StoredWeight."""
        return self._parts.targets()

    def joint_call(self, call: LinearCall) -> None:
        """See StoredWeight."""

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See StoredWeight."""
        return self._compute(call, self.scales)

    def multiply_gate(self, call: LinearCall) -> torch.Tensor:
        """As multiply, by silu(gate) · up; call.x is [gate | up]."""
        return self._compute(call, self.scales, of_gate=True)

    def leaves_gate(self, call: LinearCall) -> bool:
        """Whether the gated call is done sooner without its gate, left to `multiply_gate` of the map that follows."""
        return self._compute.leaves_gate(call, self.scales)


def scales_shape(scheme: Fp8Scheme, sizes: tuple[int, ...], in_size: int) -> tuple[int, ...]:
    """Of the scales of parts of these output sizes."""
    if scheme.scales != "block":
        return (sum(sizes),)
    return sum(sizes) // rows_per_scale(scheme.block_rows, sizes), -(-in_size // BLOCK)
