"""Numbers → e4m3 with scales: the largest magnitude that shares a scale becomes the type's largest number."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.float8 import FP8_MAX, to_float8
from oneloop_kernels.ops.fp8_linear import BLOCK

_SMALLEST_SCALE: Final = 1e-12
"""Of what is all zero."""


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values: [n, m] → e4m3 [n, m], float32 scales [n]."""
    wide = values.float()
    scales = _scales(wide.abs().amax(1))
    return _quantized(wide, scales[:, None]), scales


def quantize_blocks(values: torch.Tensor, block_rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """values: [n, m] → e4m3 [n, m], float32 scales [⌈n / block_rows⌉, ⌈m / BLOCK⌉]. What a block lacks counts as 0."""
    rows, columns = values.shape
    wide = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % block_rows))
    tiles = wide.view(wide.shape[0] // block_rows, block_rows, wide.shape[1] // BLOCK, BLOCK)
    scales = _scales(tiles.abs().amax((1, 3)))
    quantized = _quantized(tiles, scales[:, None, :, None]).view(wide.shape)
    return quantized[:rows, :columns].contiguous(), scales


def dequantized(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [n, m] of e4m3 [n, m] with scales [n] or [n / block_rows, ⌈m / BLOCK⌉]. Takes no memory beside."""
    wide = quantized.float()
    if scales.dim() == 1:
        return wide.mul_(scales[:, None])
    rows, columns = wide.shape
    of_rows = scales.repeat_interleave(rows // scales.shape[0], dim=0)
    for block, first in enumerate(range(0, columns, BLOCK)):
        wide[:, first : first + BLOCK].mul_(of_rows[:, block, None])
    return wide


def _scales(largest: torch.Tensor) -> torch.Tensor:
    return (largest / FP8_MAX).clamp(min=_SMALLEST_SCALE)


def _quantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return to_float8(values / scales)
