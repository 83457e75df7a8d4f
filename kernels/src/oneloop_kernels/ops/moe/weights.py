"""How the weights of a layer's experts are kept: stacked, as plain numbers or as others with their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from oneloop_kernels.ops.fp8_linear.quantize import dequantized, quantize_blocks, quantize_rows
from oneloop_kernels.ops.moe.packed_stack import PackedStack
from oneloop_kernels.ops.packed_linear import TILE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

WIDENED_AT_ONCE: Final = 1 << 22
"""Numbers of a quantised expert that are written out at a time where there are no kernels for them: 16 MiB."""


class Fp8Stack(NamedTuple):
    """Weights in e4m3. What they are multiplied by is quantised too, as in ops.fp8_linear."""

    values: torch.Tensor
    """[num_experts, rows, in_size], contiguous."""
    scales: torch.Tensor
    """float32 factors: [num_experts, rows], one per row; or [num_experts, rows / n, ⌈in_size / BLOCK⌉], per block."""

    @property
    def shape(self) -> torch.Size:
        """[num_experts, rows, in_size]."""
        return self.values.shape

    @property
    def by_block(self) -> bool:
        """Whether scales are those of blocks."""
        return self.scales.dim() == 3


ExpertWeight = torch.Tensor | Fp8Stack | PackedStack
"""The weight of one map of all experts, [num_experts, rows, in_size]. A tensor: plain numbers of the model's type."""


def kind_of(weight: ExpertWeight) -> str:
    """A name for how it is kept, which plans are found by."""
    if isinstance(weight, torch.Tensor):
        return "plain"
    if isinstance(weight, PackedStack):
        ordered = "" if weight.order is None else "-ordered"
        return f"w{weight.bits}g{TILE_COLUMNS // weight.groups}{ordered}"
    return "fp8-block" if weight.by_block else "fp8"


def multiply(
    x: torch.Tensor,
    weight: ExpertWeight,
    expert: int,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> torch.Tensor:
    """[n, rows]: x [n, in_size] · one expert's weightᵀ, in plain torch. product: as in linear.apart.Stages."""
    if isinstance(weight, torch.Tensor):
        return product(x, weight[expert], None)
    if isinstance(weight, PackedStack):
        return product(x, weight.plain(expert), None)  # written out for no longer than it is used
    return _multiply_fp8(x, weight.values[expert], weight.scales[expert], product)


def _multiply_fp8(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> torch.Tensor:
    """As ops.fp8_linear.reference, some rows of the weight at a time."""
    quantized = dequantized(*(quantize_rows(x) if scales.dim() == 1 else quantize_blocks(x)))
    rows, in_size = values.shape
    shared = rows // scales.shape[0]
    step = max(1, WIDENED_AT_ONCE // (in_size * shared))
    out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    for first in range(0, scales.shape[0], step):
        some = slice(first * shared, (first + step) * shared)
        out[:, some] = product(quantized, dequantized(values[some], scales[first : first + step]), None)
    return out
