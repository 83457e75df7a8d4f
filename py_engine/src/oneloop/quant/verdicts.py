"""What a checkpoint's numbers must hold is asked on the device, and looked at once: each look waits for the device."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class WeightError(ValueError):
    """A checkpoint's tensor whose numbers cannot be used. The loader tells it as a ModelError of its file."""

    def __init__(self, tensor: str, message: str) -> None:
        """message: with the remedy."""
        super().__init__(message)
        self.tensor = tensor


class Verdicts:
    """Those of one load, which several threads may add to."""

    def __init__(self) -> None:
        self._said: list[tuple[torch.Tensor, WeightError]] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, what this thread expects is told by `look`."""
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)

    def add(self, holds: torch.Tensor, error: WeightError) -> None:
        """error: what `look` raises where holds, a bool of no dimension, is false."""
        self._said.append((holds, error))

    def look(self) -> None:
        """WeightError of the first that does not hold. Waits for the device once, if there are any."""
        if not self._said:
            return
        held = torch.stack([holds for holds, _ in self._said]).tolist()
        errors = [error for is_held, (_, error) in zip(held, self._said, strict=True) if not is_held]
        if errors:
            raise errors[0]


_COLLECTING: ContextVar[Verdicts | None] = ContextVar("oneloop_quant_verdicts", default=None)


def expect(holds: torch.Tensor, tensor: str, message: str) -> None:
    """What is wrong with a tensor where holds, a bool of no dimension, is false: a WeightError, at once or by whoever
    collects. What is made of the tensor until then may be garbage, but must not fail.
    """
    collecting, error = _COLLECTING.get(), WeightError(tensor, message)
    if collecting is not None:
        collecting.add(holds, error)
    elif not bool(holds):
        raise error


def expect_finite(tensor: str, values: torch.Tensor) -> None:
    """As `expect`: all are numbers. values: as they are kept."""
    expect(values.isfinite().all(), tensor, not_finite(str(values.dtype).removeprefix("torch.")))


def not_finite(kind: str) -> str:
    """What is wrong with a tensor that holds infinities or NaN. kind: of what is kept."""
    return f"holds what is no finite number as {kind}; fetch the model again"
