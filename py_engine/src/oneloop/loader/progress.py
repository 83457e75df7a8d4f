"""How long work reports what it has done. No torch."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total): what is a short phrase, done and total are bytes. May be called often."""


def no_progress(what: str, done: int, total: int) -> None:
    """Says nothing."""
