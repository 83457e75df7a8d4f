"""How far two computations of the same thing may lie apart, by dtype. There is no other table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual − expected| ≤ relative · (|expected| + scale), where scale is the root mean square of expected.

    The scale takes the place of an absolute tolerance: cancellation leaves errors of the size of what was added up,
    and no fixed number fits tensors of every magnitude.
    """

    relative: float


TOLERANCES: Final[dict[torch.dtype, Tolerance]] = {
    torch.float32: Tolerance(2e-5),
    torch.float16: Tolerance(5e-3),
    torch.bfloat16: Tolerance(4e-2),
}
"""About 170 units in the last place of float32 and 5 of the short types: the order of summation of a few thousand
terms, and the roundings inside a decoder layer (transformers' own lie up to 3.7e-2 from float32 in bfloat16)."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare by the table; AssertionError says where and by how much the worst element is off.

    dtype: the type the computation ran in; default: that of `actual`. NaN equals nothing.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    relative = TOLERANCES[dtype or actual.dtype].relative
    wide_actual, wide_expected = actual.double(), expected.double()
    scale = wide_expected.square().mean().sqrt()
    allowed = relative * (wide_expected.abs() + scale)
    excess = (wide_actual - wide_expected).abs() / allowed.clamp_min(1e-300)
    if bool((excess <= 1.0).all()):
        return
    worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
    raise AssertionError(
        f"element {where} is {wide_actual.flatten()[worst]:.6g}, expected {wide_expected.flatten()[worst]:.6g}: "
        f"{float(excess.flatten()[worst]):.2f} times the tolerance of {dtype or actual.dtype} ({relative:g} relative)"
    )
