"""What a stored weight is to the linear layer and the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop_kernels.ops.linear import LinearCall
    from oneloop_kernels.ops.packed_linear import PackedCall


@dataclass(frozen=True, slots=True)
class Incoming:
    """A checkpoint's tensor that is not kept as it is: the loader puts it together and hands it over."""

    shape: tuple[int, ...]
    """What is handed over may have another one with as many elements: the file's own."""
    dtype: torch.dtype
    """Of what is handed over. Files of float types are converted, others must have it."""
    device: torch.device
    take: Callable[[torch.Tensor], None]
    """Given the tensor, once, on the device: makes of it what is kept. It may be overwritten, and is not used again.
    What the numbers must hold is left to quant.verdicts: to look at them here would be to wait for the device."""
    sample: Callable[[], torch.Tensor] | None = None
    """What dummy weights have in its place, where not any numbers will do."""
    optional: bool = False
    """A checkpoint may lack it."""


Target = torch.Tensor | Incoming
"""Where the loader puts a checkpoint's tensor: into a view of a parameter, of its shape, or into hands."""


class StoredWeight(Protocol):
    """The weight of a linear map, of one or several parts one below the other, uninitialised until it is loaded.

    matrix: what stands as `weight` in the calls, a row per output; its type and columns are the weight's own matter.
    """

    @property
    def matrix(self) -> torch.Tensor: ...

    @property
    def is_plain(self) -> bool:
        """Whether matrix is [out, in] in the model's type, so that anyone may multiply by it."""

    def targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where the loader puts it."""

    def joint_call(self, call: LinearCall) -> LinearCall | PackedCall | None:
        """The call for who computes it together with something else (ops.rope); None where that is not possible."""

    def multiply(self, call: LinearCall) -> torch.Tensor:
        """The call, whose weight is `matrix`, with everything around the product: see ops.linear.Linear."""
