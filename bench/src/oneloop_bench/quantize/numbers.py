"""A weight in 4 bits: rounded to nearest, or so that the results of calibration inputs change least (GPTQ).

GPTQ (arXiv 2210.17323): columns are rounded one after the other, and what one loses is made up for by those that are
left, by the inverse of H = Σ x xᵀ over the calibration's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

LEVELS: Final = 15
MIDDLE: Final = 8
_DAMPING: Final = 0.01
"""Of the mean of H's diagonal, added to it."""
_BLOCK: Final = 64
"""Columns whose errors are spread over the columns behind them at once."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """(values − zeros) · scales.

    values: uint8 [out, in]. scales float16, zeros uint8: [out, groups]. groups: int64 [in], of each input.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def plain(self) -> torch.Tensor:
        """float32 [out, in]."""
        zeros, scales = self.zeros[:, self.groups].float(), self.scales[:, self.groups].float()
        return (self.values.float() - zeros) * scales


@dataclass(frozen=True, slots=True)
class Grid:
    """How numbers are spaced. group_size: columns that share a scale. symmetric: all zeros are 8."""

    group_size: int
    symmetric: bool = False

    def fit(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weight: [out, a group's columns] → scales float16, zeros uint8, both [out]: from the least to the largest."""
        low, high = weight.amin(1).clamp_max(0.0), weight.amax(1).clamp_min(0.0)
        if self.symmetric:
            bound = torch.maximum(-low, high)
            low, high = -bound, bound
        scales = ((high - low) / LEVELS).clamp_min(2.0**-14).half()
        if self.symmetric:
            return scales, torch.full_like(scales, MIDDLE, dtype=torch.uint8)
        return scales, (-low / scales.float()).round().clamp(0, LEVELS).to(torch.uint8)


def _rounded(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """uint8, of the shape of all three."""
    return (weight / scale.float() + zero.float()).round().clamp(0, LEVELS).to(torch.uint8)


def round_to_nearest(weight: torch.Tensor, grid: Grid) -> Quantized:
    """weight: [out, in]."""
    parts = [grid.fit(part) for part in torch.split(weight, grid.group_size, 1)]
    scales, zeros = (torch.stack(found, 1) for found in zip(*parts, strict=True))
    groups = torch.arange(weight.shape[1]) // grid.group_size
    return Quantized(_rounded(weight, scales[:, groups], zeros[:, groups]), scales, zeros, groups)


def gptq(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, by_activation: bool) -> Quantized:
    """weight: [out, in]. hessian: H, [in, in]. by_activation: the columns with the largest inputs go first, and groups
    are of columns in that order."""
    columns = weight.shape[1]
    order = hessian.diagonal().argsort(descending=True) if by_activation else torch.arange(columns)
    left = weight[:, order].clone()
    inverse = _inverse_factor(hessian[order][:, order])
    values = torch.empty(weight.shape, dtype=torch.uint8)
    scales, zeros = [], []
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.zeros(weight.shape[0], end - start)
        for column in range(start, end):
            if column % grid.group_size == 0:
                behind = left[:, column : column + grid.group_size].clone()
                done = column - start
                # What the block's errors so far will do to the part of the group behind the block.
                behind[:, end - column :] -= (
                    errors[:, :done] @ inverse[start:column, end : column + grid.group_size]
                )
                scale, zero = grid.fit(behind)
                scales.append(scale)
                zeros.append(zero)
            values[:, column] = _rounded(left[:, column], scales[-1], zeros[-1])
            meaning = (values[:, column].float() - zeros[-1].float()) * scales[-1].float()
            error = (left[:, column] - meaning) / inverse[column, column]
            left[:, column:end] -= error[:, None] * inverse[column, column:end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ inverse[start:end, end:]
    back = order.argsort()
    groups = (torch.arange(columns) // grid.group_size)[back]
    return Quantized(values[:, back].contiguous(), torch.stack(scales, 1), torch.stack(zeros, 1), groups)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper triangular factor of H⁻¹; inputs that are always zero count as any other, a little."""
    damped = hessian + torch.eye(len(hessian)) * (_DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
