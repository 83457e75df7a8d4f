"""What a line of the kernel table is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Memory = Literal["read", "copy"]
Compute = Literal["bf16", "fp8"]

OURS: Final = "oneloop"


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One line or, with several ways to the same result, several.

    make: one set of random inputs. ways: each begins with a call that gives the launch, which takes a set; ours is the
    first. num_bytes, num_flops: the fewest that a launch moves and computes. memory: the ceiling of num_bytes, how fast
    memory is read, or read and written. compute: that of num_flops. share, us: to be reached by ours; None: not asked
    for.
    """

    family: str
    name: str
    make: Callable[[], Any]
    ways: Mapping[str, Callable[[], Callable[[Any], object]]]
    num_bytes: int
    memory: Memory
    num_flops: float = 0.0
    share: float | None = None
    us: float | None = None
    compute: Compute = "bf16"
