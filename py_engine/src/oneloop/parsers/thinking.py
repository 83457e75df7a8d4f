"""Thinking between two marks, in front of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.scanner import SPACE, form, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.parsers.scanner import Atom, Scanner, Steps


def thinking_reader(
    start: Sequence[Atom], end: Sequence[Atom], *, until: str = ""
) -> Callable[[Scanner, bool], Steps[None]]:
    """A reader of thinking that `start` opens and `end` closes, both left out.

    until: markup that closes it as well, and is not taken. The reader is told whether the thinking is open from the
    first character on; else it begins with the mark, or there is none. Cut off, it stays thinking.
    """
    opening, closing = form(SPACE, *start), form(*end)
    if until:
        closing = one_of(closing, form(until))

    def read(scanner: Scanner, is_open: bool) -> Steps[None]:
        found = yield from scanner.accept(opening)
        if found is None and not is_open:
            return
        scanner.out.begin_reasoning(scanner.offset() - len((found or "").lstrip().encode()))
        while True:
            mark = yield from scanner.seek(closing, scanner.out.reasoning)
            if mark is None:
                return
            scanner.commit()
            if scanner.is_end is None or scanner.is_end():
                break
            scanner.out.reasoning(mark)
        if mark == until:
            scanner.at -= len(mark)
        scanner.out.end_reasoning(scanner.offset())

    return read
