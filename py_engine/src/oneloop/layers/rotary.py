"""Rotary position embedding: frequencies with their scalings, and cos and sin of a step.

Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); Peng et al. 2023 (YaRN); the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from oneloop.errors import ModelError
from oneloop_kernels.ops.rope import ROPE, RotaryStep

if TYPE_CHECKING:
    from oneloop.formats.model_spec import ModelSpec, RopeScaling

__all__ = ["Rotary", "RotaryStep", "rope_frequencies"]


class Rotary:
    """Angles of one model. Nothing is tabulated: a step computes its own positions, once for all layers."""

    __slots__ = ("_angles",)

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for a scaling it does not know."""
        frequencies, factor = rope_frequencies(spec)
        self._angles = ROPE.resolve(device, dtype).angles(frequencies.to(device), factor, dtype)

    def with_embedding(
        self, positions: torch.Tensor, token_ids: torch.Tensor, table: torch.Tensor
    ) -> tuple[RotaryStep, torch.Tensor]:
        """The angles, and the tokens' rows of an embedding's weight (new): what every step begins with.

        positions: [num_tokens] integers, int32 or int64; token_ids: the same, in [0, vocab_size).
        """
        return self._angles.with_embedding(positions, token_ids, table)


def rope_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """Radians per position, [head_dim / 2] float32, and the factor on cos and sin."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # NTK by length starts beyond max_position, never served
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, spec, scaling), scaling.attention_factor
    if scaling.kind == "factors":
        if len(scaling.factors) != len(plain):
            raise ModelError(
                spec.architecture,
                f"{len(scaling.factors)} rotary factors, expected {len(plain)} (head_dim / 2)",
                item="rope_freqs",
            )
        return plain / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    raise ModelError(
        spec.architecture,
        f"unknown rotary scaling {scaling.kind!r}; known: linear, dynamic, llama3, yarn, factors",
        item="rope_scaling",
    )


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Waves longer than the original context are stretched, short ones kept, those between interpolated."""
    context = scaling.original_max_position
    waves = 2 * math.pi / plain
    stretched = plain / scaling.factor
    longest_kept = context / scaling.high_freq_factor
    shortest_stretched = context / scaling.low_freq_factor
    smooth = (context / waves - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * stretched + smooth * plain
    scaled = torch.where(waves > shortest_stretched, stretched, between)
    return torch.where(waves < longest_kept, plain, scaled)


def _yarn(plain: torch.Tensor, spec: ModelSpec, scaling: RopeScaling) -> torch.Tensor:
    """Dimensions that turn often in the original context are kept, those that turn rarely stretched."""

    def dimension_of(rotations: float) -> float:
        """The dimension whose wave turns that often in the original context."""
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return spec.head_dim * math.log(ratio) / (2 * math.log(spec.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return plain / scaling.factor * (1 - kept) + plain * kept
