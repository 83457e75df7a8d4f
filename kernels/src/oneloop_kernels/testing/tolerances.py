"""How far two computations of the same thing may lie apart, by what is computed and in which dtype. The only table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

Kind = Literal[
    "elementwise", "rotation", "attention", "linear", "linear of a norm", "gated linear", "gated linear of a norm",
    "layer",
]  # fmt: skip

ROUNDOFF: Final[dict[torch.dtype, float]] = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Rounding to the type changes a number by at most this part of it."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual − expected| ≤ roundoff · (own · |expected| + summed · scale); scale: root mean square of the expected.

    own: roundings of the result itself. summed: those of what was added up to it, which cancellation leaves in full:
    they are spread like the result, so that five deviations of them cover millions of elements. float32: there, in
    place of roundoff and both factors, since the order of summation and approximated functions count for more.
    by_row: the scale is that of the last dimension, each row by itself; else of the whole.
    """

    own: float
    summed: float
    float32: float
    by_row: bool

    def allowed(
        self, expected: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Per element. expected: float64. scale: in place of its root mean square, where elements differ in that."""
        if scale is None:
            squares = expected.square()
            scale = (
                squares.mean(-1, keepdim=True) if self.by_row and expected.dim() else squares.mean()
            ).sqrt()
        if dtype is torch.float32:
            return self.float32 * (expected.abs() + scale)
        return ROUNDOFF[dtype] * (self.own * expected.abs() + self.summed * scale)


TOLERANCES: Final[dict[Kind, Tolerance]] = {
    # Computed in float32. A norm is rounded before its weight and after, as the models do it; an activation once.
    "elementwise": Tolerance(own=2.1, summed=0.1, float32=1e-6, by_row=True),
    # The norm of a head is rounded before its weight and after; then two products of such numbers cancel. Seen: 3.8.
    "rotation": Tolerance(own=2.1, summed=7.0, float32=2e-6, by_row=True),
    # The result is rounded, and so is each weight of the softmax before its value is added: 0.4 deviations of the
    # row's own spread. Seen: 1.5.
    "attention": Tolerance(own=1.1, summed=3.0, float32=5e-6, by_row=True),
    # Products are exact, and added in float32. The sum is rounded, and again where a residual is added to it.
    "linear": Tolerance(own=2.1, summed=1.0, float32=5e-6, by_row=False),
    # x is rounded twice by its norm before the products: so done in plain torch, 3.6 of two million elements.
    "linear of a norm": Tolerance(own=2.1, summed=5.0, float32=5e-6, by_row=False),
    # Gate and up may be rounded each, then their product.
    "gated linear": Tolerance(own=6.0, summed=1.0, float32=5e-6, by_row=False),
    # Both are off as a linear map of a norm is, each multiplied by the other: tests give that scale (`gated_scale`).
    "gated linear of a norm": Tolerance(own=6.0, summed=5.0, float32=5e-6, by_row=False),
    # A decoder layer: norms, three matrix products one after the other and attention, each rounded. transformers' own
    # lie up to 9.5 from float32.
    "layer": Tolerance(own=10.0, summed=10.0, float32=2e-5, by_row=False),
}


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    kind: Kind = "layer",
    scale: torch.Tensor | None = None,
    more: torch.Tensor | None = None,
) -> None:
    """Compare by the table; AssertionError says where and by how much the worst element is off.

    dtype: the type the computation ran in; default: that of `actual`. scale: see Tolerance.allowed. more: per
    element, allowed beside what the table says: by another law (`short_sums`). NaN equals nothing.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    dtype = dtype or actual.dtype
    wide_actual, wide_expected = actual.double(), expected.double()
    allowed = TOLERANCES[kind].allowed(wide_expected, dtype, scale)
    if more is not None:
        allowed = allowed + more
    excess = (wide_actual - wide_expected).abs() / allowed.clamp_min(1e-300)
    if bool((excess <= 1.0).all()):
        return
    worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
    raise AssertionError(
        f"element {where} is {wide_actual.flatten()[worst]:.6g}, expected {wide_expected.flatten()[worst]:.6g}: "
        f"{float(excess.flatten()[worst]):.2f} times the tolerance of {kind} in {dtype}; "
        f"{int((~(excess <= 1.0)).sum())} of {excess.numel()} elements are beyond it"
    )


def assert_as_accurate(actual: torch.Tensor, plain: torch.Tensor, expected: torch.Tensor) -> None:
    """`actual` lies no farther from `expected`, in a wider dtype, than `plain`: the same by plain torch in actual's.

    For what rounds so often that no bound by theory is near: the root mean square of its errors is at most 1.1 times
    that of plain's, its largest at most 1.5 times. AssertionError says by how much more. NaN equals nothing.
    """
    assert actual.shape == plain.shape == expected.shape
    assert actual.dtype == plain.dtype != expected.dtype
    own, others = ((given.double() - expected.double()).abs() for given in (actual, plain))
    for name, limit, measure in (
        ("root mean square of errors", 1.1, lambda errors: errors.square().mean().sqrt()),
        ("largest error", 1.5, torch.max),
    ):
        ratio = float(measure(own) / measure(others).clamp_min(1e-300))
        assert ratio <= limit, f"the {name} is {ratio:.2f} times that of plain torch in {actual.dtype}"


def gated_scale(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Of silu(gate) · up: what an error as large as the sums' root mean square in either of them makes of it."""
    size = torch.cat((gate, up), -1).square().mean().sqrt()
    return gated_error(gate, up, size, size)


def gated_error(
    gate: torch.Tensor, up: torch.Tensor, of_gate: torch.Tensor, of_up: torch.Tensor
) -> torch.Tensor:
    """Of silu(gate) · up: what such errors in either of them make of it."""
    return (
        1.1 * up.abs() * of_gate + (gate * gate.sigmoid()).abs() * of_up
    )  # 1.1: the most that silu rises by
