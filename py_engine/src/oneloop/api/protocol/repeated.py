"""Checked requests by what was asked: clients vary their prompts, and ask everything else alike.

Checking some thirty fields takes longer than looking up what the same bytes were found to mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_REMEMBERED = 256
MAX_KEY_BYTES = 512
"""Longer requests are read anew each time: what is remembered stays small, whatever is sent."""
_SIZED = frozenset({str, list, dict})
_MAX_LEN = 64
"""Of a text, a list or an object; longer ones are not looked at."""


class Repeated(Generic[T]):
    """Readings of the members of a body that are no prompt. What is read must never be changed."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], T] = {}

    def read(self, members: dict[str, Any], num_prompts: int, read: Callable[[], T]) -> T:
        """`read()`, or what it gave for the same members, types of numbers included, and as many prompts.

        What it raises is raised, and not remembered.
        """
        key = _key(members)
        if key is None:
            return read()
        place = (num_prompts, key)
        known = self._known.get(place)
        if known is None:
            known = read()
            if len(self._known) >= MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[place] = known
        return known


def _key(members: dict[str, Any]) -> bytes | None:
    """None for requests that are not to be remembered."""
    for value in members.values():
        if type(value) in _SIZED and len(value) > _MAX_LEN:
            return None
    try:
        key = orjson.dumps(members)
    except orjson.JSONEncodeError:  # nested more deeply than it writes
        return None
    return key if len(key) <= MAX_KEY_BYTES else None
