"""Keys of Triton's cache that do not depend on what was compiled before."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from triton.runtime.jit import DependenciesFinder

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def definite_keys() -> Iterator[None]:
    """Within, a kernel's key has the constants of all functions that it calls.

    Triton 3.6 adds those of a callee before it has looked for them: they are there only if something else that calls it
    was looked at earlier. So two processes, or two starts, would have different keys for one kernel. Here each callee
    is looked at first. For all kernels that no one has asked for their key yet.
    """
    update = DependenciesFinder._update_hash

    def callee_first(self: Any, callee: Any) -> None:
        _ = callee.cache_key
        update(self, callee)

    DependenciesFinder._update_hash = callee_first
    try:
        yield
    finally:
        DependenciesFinder._update_hash = update
