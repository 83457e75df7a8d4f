"""Which implementation of an operation runs: a typed, immutable list per family, picked by device and dtype.

A family names its implementations by module, so that one that needs Triton is imported only where it is picked.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from oneloop_kernels.launch import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

TRITON: Final = "triton"
"""Name of every family's Triton implementation."""

_PREFERRED: ContextVar[str | None] = ContextVar("oneloop_kernels_preferred", default=None)

F = TypeVar("F")
"""The family's contract: a Protocol that every implementation satisfies."""


class KernelError(LookupError):
    """No implementation of a family runs on the device and dtype that were asked for."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute a family's operations.

    module: where it is defined; it is imported when the implementation is picked.
    attribute: the object in that module that satisfies the contract.
    device_types: torch device types it runs on; empty: all.
    dtypes: torch dtype names ("float32") it computes; empty: all.
    """

    name: str
    module: str
    attribute: str
    device_types: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()

    def runs_on(self, device: torch.device, dtype: torch.dtype, *, wanted: bool = False) -> bool:
        """Whether it computes tensors of this dtype on this device.

        wanted: it was asked for by name. Triton's interpreter, where it is on, then also runs it on the CPU.
        """
        dtype_name = str(dtype).removeprefix("torch.")
        interpreted = wanted and INTERPRETED and self.name == TRITON and device.type == "cpu"
        return (not self.device_types or device.type in self.device_types or interpreted) and (
            not self.dtypes or dtype_name in self.dtypes
        )


@dataclass(frozen=True, slots=True)
class Family(Generic[F]):
    """An operation family: its name and its implementations, the preferred one first."""

    name: str
    implementations: tuple[Implementation, ...]

    def candidates(self, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        """Names of the implementations that run there, the preferred one first."""
        return tuple(entry.name for entry in self._in_order(_PREFERRED.get(), device, dtype))

    def resolve(self, device: torch.device, dtype: torch.dtype, *, name: str | None = None) -> F:
        """The preferred implementation for the device and dtype, or the one that is named.

        Raises KernelError naming the family when none fits.
        """
        for entry in self._in_order(name or _PREFERRED.get(), device, dtype):
            if name in (None, entry.name):
                return cast("F", getattr(import_module(entry.module), entry.attribute))
        wanted = f"implementation {name!r}" if name else "implementation"
        known = ", ".join(entry.name for entry in self.implementations)
        raise KernelError(f"{self.name}: no {wanted} for {dtype} on {device.type}; there are: {known}")

    def _in_order(self, wanted: str | None, device: torch.device, dtype: torch.dtype) -> list[Implementation]:
        """Those that run there; one that is wanted by name before all others."""
        fitting = [e for e in self.implementations if e.runs_on(device, dtype, wanted=e.name == wanted)]
        return sorted(fitting, key=lambda entry: entry.name != wanted)


@contextmanager
def prefer(name: str) -> Iterator[None]:
    """Within the context, `resolve` takes implementations of that name where a family has one for the dtype.

    prefer("triton") with Triton's interpreter on runs the path of the GPU on CPU tensors. What was resolved stays
    as it is: make the model inside the context.
    """
    token = _PREFERRED.set(name)
    try:
        yield
    finally:
        _PREFERRED.reset(token)
