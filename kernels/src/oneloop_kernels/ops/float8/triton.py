"""Conversion to 8 bits within kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.float8 import FP8_MAX

_MAX = tl.constexpr(FP8_MAX)
_INTERPRETED = tl.constexpr(INTERPRETED)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_ROUNDER = tl.constexpr(1.5 * 2.0**14)
"""A float32 of this size has a last place of 2⁻⁹, as numbers below _LEAST_NORMAL have in 8 bits."""


@triton.jit
def as_float8(values):
    """As float8.to_float8. values: of any float type."""
    wide = tl.clamp(values.to(tl.float32), -_MAX, _MAX, tl.PropagateNan.ALL)
    if _INTERPRETED:  # Triton's interpreter knows neither NaN nor rounding that carries into the exponent
        size = tl.abs(wide)
        whole = size.to(tl.uint32, bitcast=True)
        normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (
            120 << 3
        )  # the exponents' biases: 127 − 7
        small = (size + _ROUNDER).to(tl.uint32, bitcast=True) & 0xF
        code = tl.where(size < _LEAST_NORMAL, small, normal)
        sign = wide.to(tl.uint32, bitcast=True) >> 31 << 7
        narrow = tl.where(wide == wide, code, 0x7F) | sign
        return narrow.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return wide.to(tl.float8e4nv)
