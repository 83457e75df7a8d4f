"""Quantised weights as checkpoints of AWQ, GPTQ and compressed-tensors have them; see ops.packed_linear.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import torch

if TYPE_CHECKING:
    from oneloop_bench.quantize.numbers import Grid, Quantized

Layout = Literal["awq", "gptq", "compressed-tensors"]
_IN_TURN: Final = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The number that lies in bits 0–3, 4–7, … of a word."""


def tensors_of(
    layout: Layout, found: Quantized, *, by_activation: bool, symmetric: bool
) -> dict[str, torch.Tensor]:
    """Last part of the name → tensor."""
    values, zeros, groups = found.values, found.zeros, found.groups.to(torch.int32)
    if layout == "awq":
        return {
            "qweight": _packed(values.T, _AWQ_ORDER),
            "qzeros": _packed(zeros.T, _AWQ_ORDER),
            "scales": found.scales.T.contiguous(),
        }
    if layout == "gptq":
        return {
            "qweight": _packed(values).T.contiguous(),
            "qzeros": _packed(zeros.T - 1),  # as the format's first version has them; 0 becomes 15
            "scales": found.scales.T.contiguous(),
            "g_idx": groups,
        }
    tensors = {
        "weight_packed": _packed(values),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(values.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _packed(zeros.T).T.contiguous()
    return tensors | ({"weight_g_idx": groups} if by_activation else {})


def config_of(layout: Layout, grid: Grid, *, by_activation: bool) -> dict[str, Any]:
    """quantization_config."""
    if layout == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": grid.group_size, "zero_point": True, "version": "gemm"
        }  # fmt: skip
    if layout == "gptq":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": grid.group_size, "sym": grid.symmetric,
            "desc_act": by_activation, "checkpoint_format": "gptq",
        }  # fmt: skip
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": grid.group_size,
        "symmetric": grid.symmetric, "actorder": "group" if by_activation else None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def _packed(numbers: torch.Tensor, order: tuple[int, ...] = _IN_TURN) -> torch.Tensor:
    """uint8 [n, m] → int32 [n, m / 8]; the last word is filled up with zeros."""
    filled = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % 8))
    eights = (filled & 15).to(torch.int32).view(len(filled), -1, 8)
    words = torch.zeros(eights.shape[:2], dtype=torch.int32)
    for place, number in enumerate(order):
        words |= eights[:, :, number] << (4 * place)
    return words
