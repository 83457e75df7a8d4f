"""`oneloop bench`: hands over to the distribution oneloop-bench, found through an entry point."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUP = "oneloop.commands"
EXIT_USAGE = 2


def bench(arguments: Sequence[str]) -> int:
    """Run it with these arguments; returns its exit code. Raises OneloopError."""
    found = entry_points(group=GROUP, name="bench")
    if not found:
        print(
            "oneloop: error: `oneloop bench` is a distribution of its own: pip install oneloop-bench",
            file=sys.stderr,
        )
        return EXIT_USAGE
    command: Callable[[Sequence[str]], int] = next(iter(found)).load()
    return command(arguments)
