"""Numbers in 8 bits, float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities, NaN where all bits are set.

Rounded to nearest even; what is beyond ±448 becomes ±448. Source: Micikevicius et al. 2022, FP8 formats for deep
learning.
"""

from __future__ import annotations

from typing import Final

import torch

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


def to_float8(values: torch.Tensor) -> torch.Tensor:
    """Any float type → float8_e4m3fn; a NaN stays one."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)  # torch's conversion alone makes NaN of what is beyond
