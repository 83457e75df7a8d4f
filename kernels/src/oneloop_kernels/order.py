"""The fixed order: within it, the bits of a token's row depend on nothing but its own sequence.

By default a kernel is cut by how many rows there are, and with it the order in which a row's sums are added up. Within
`fixed_order` every sum is taken in an order that follows from the shape of the model and the position in the sequence
alone. What that order is stands where it is kept: ops.linear.ordered, ops.paged_attention.triton.ordered, ops.rms_norm.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIXED: ContextVar[bool] = ContextVar("oneloop_kernels_fixed_order", default=False)


def order_is_fixed() -> bool:
    """Whether what is launched now keeps the fixed order."""
    return _FIXED.get()


@contextmanager
def fixed_order(fixed: bool = True) -> Iterator[None]:
    """Within, this thread launches (or captures) kernels of the fixed order; with `fixed` False, the default ones."""
    token = _FIXED.set(fixed)
    try:
        yield
    finally:
        _FIXED.reset(token)
