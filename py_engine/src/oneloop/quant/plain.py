"""Weights as they are computed with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.linear import LINEAR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.quant.base import Target
    from oneloop_kernels.ops.linear import LinearCall


class PlainWeight:
    """See StoredWeight. matrix: [out, in]."""

    __slots__ = ("_compute", "_parts", "is_plain", "matrix")

    def __init__(self, parts: Mapping[str, int], matrix: torch.Tensor) -> None:
        """parts: checkpoint name prefix → output size. matrix: uninitialised, or one to share."""
        self._parts = dict(parts)
        self.matrix = matrix
        self.is_plain = True
        self._compute = LINEAR.resolve(matrix.device, matrix.dtype)

    def targets(self) -> dict[str, Target]:
        """See StoredWeight."""
        views = torch.split(self.matrix, list(self._parts.values()))
        return {f"{name}.weight": view for name, view in zip(self._parts, views, strict=True)}

    def joint_call(self, call: LinearCall) -> LinearCall:
        """See StoredWeight."""
        return call

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """See StoredWeight."""
        return self._compute(call)
