"""What a launch depends on beside its arguments: the interpreter, programmatic dependent launch, the chip's size.

Imports no Triton, so that the registry may ask whether the interpreter is on.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oneloop_kernels.compiling.workers import CompileWorkers

T = TypeVar("T")

INTERPRETED: Final[bool] = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Python on CPU tensors. Triton reads the same variable when a kernel is defined."""

_PDL_CAPABILITY: Final = 9
"""Compute capability (major) from which a kernel may begin while the one before it ends."""


class Card(NamedTuple):
    """What kernels are chosen by. generation: compute capability (major); num_sms: multiprocessors."""

    name: str
    generation: int
    num_sms: int


_STAND_IN: Final = Card("", 0, 6)
"""Where there is no GPU: few multiprocessors, since the interpreter runs programs one after another."""


@cache
def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on the device are launched with programmatic dependent launch (PDL)."""
    return not INTERPRETED and generation(device) >= _PDL_CAPABILITY


@cache
def generation(device: torch.device) -> int:
    """Compute capability (major) of the device: 9 is Hopper. On a CPU 0."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else _STAND_IN.generation


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; on a CPU a stand-in."""
    if device.type != "cuda":
        return _STAND_IN.num_sms
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def card_name(device: torch.device) -> str:
    """The GPU's name as torch gives it; on a CPU nothing."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _STAND_IN.name


def of_card(name: str, tuned: Mapping[str, T]) -> T | None:
    """What was tuned for a card: the entry whose key begins its name ("NVIDIA H200" also "NVIDIA H200 NVL")."""
    return next((entry for card, entry in tuned.items() if name.startswith(card)), None)


_OVERLAPPING: Final = MappingProxyType({"USE_PDL": True, "launch_pdl": True})
_WAITING: Final = MappingProxyType({"USE_PDL": False})
_OVERLAPS: ContextVar[bool] = ContextVar("oneloop_kernels_overlaps", default=True)


@contextmanager
def one_after_another() -> Iterator[None]:
    """Within, what this thread launches begins when the kernel before it has ended. For a map whose weight has only
    just been written: kernels ask for weights before they wait for the kernel before them. Holds for launches that ask
    `pdl_options` within, which attention does once, when it is made.
    """
    token = _OVERLAPS.set(False)
    try:
        yield
    finally:
        _OVERLAPS.reset(token)


def pdl_options(device: torch.device) -> Mapping[str, bool]:
    """Keyword arguments for the launch of a kernel that has `USE_PDL: tl.constexpr`.

    `kernel[grid](..., **pdl_options(device))`. With USE_PDL the kernel must call `tl.extra.cuda.gdc_wait()` before its
    first access to anything that a kernel before it reads or writes, and may call `gdc_launch_dependents()` early:
    those that follow then start, and wait in turn until this one has ended.
    """
    return _OVERLAPPING if _OVERLAPS.get() and pdl_supported(device) else _WAITING


@contextmanager
def compiling_ahead(num_threads: int, workers: CompileWorkers | None = None) -> Iterator[None]:
    """Within, a launch of a Triton kernel by this thread compiles it, several at a time in others, and runs nothing.

    What the kernels would have written is garbage then. One such context at a time. For the start: a kernel takes
    up to several seconds to compile, much of it under the interpreter's lock, so that `workers` do it where there are
    any. At the end all are compiled and loaded, so that a first launch, whenever it comes, reads no file; one that
    does not compile says so when it is launched.
    """
    if INTERPRETED:
        yield
        return
    from oneloop_kernels.compiling.ahead import launches_compile

    with launches_compile(num_threads, workers):
        yield
