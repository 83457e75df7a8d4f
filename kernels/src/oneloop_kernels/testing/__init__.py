"""Comparing implementations: one table of tolerances, used by every test. `hopper` compiles kernels without a GPU."""

from oneloop_kernels.testing.tolerances import (
    TOLERANCES,
    Kind,
    Tolerance,
    assert_as_accurate,
    assert_close,
    gated_error,
    gated_scale,
)

__all__ = [
    "TOLERANCES",
    "Kind",
    "Tolerance",
    "assert_as_accurate",
    "assert_close",
    "gated_error",
    "gated_scale",
]
