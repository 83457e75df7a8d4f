"""The engine of the streaming parsers: a cursor over text that comes in pieces, and forms that it is held against.

A format is a generator over a `Scanner`: it reads as if the whole text were there, and yields where it must see more to
decide. Nothing is decided on the end of a piece, so how a text is cut cannot matter. Forms are regular expressions
without backtracking, what waits for its decision is bounded, and nothing is read twice: the cost per character is
constant.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.parsers.output import Output

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A reader: it yields when it needs more text, and returns what it has read."""
Sink: TypeAlias = "Callable[[str], None]"
Atom: TypeAlias = "str | Run | tuple[str, ...]"
"""Of a form: a literal, a run of characters, or one of several literals."""

MAX_NAME_LEN = 128
"""Characters of a function's or a parameter's name."""


class MalformedError(Exception):
    """The text is not of the form that it began with. Never leaves the parsers."""


class Run:
    """Between `low` and `high` characters of a class, as many as there are."""

    __slots__ = ("pattern",)

    def __init__(self, characters: str, low: int, high: int) -> None:
        """characters: the inside of a character class."""
        self.pattern = f"[{characters}]{{{low},{high}}}+"


SPACE = Run(r" \t\r\n", 0, 64)
NAME = Run(r"A-Za-z0-9_.:/\-", 1, MAX_NAME_LEN)


_TAKEN, _FULL = "\0t", "\0f"
"""In a pattern that is being put together: where what is taken ends, and where the form ends."""


class Form:
    """A sequence of atoms that can be told, at the end of a text, from its beginning: "not", "maybe" or "yes"."""

    __slots__ = ("_ends", "pattern", "regex")

    def __init__(self, pattern: str) -> None:
        """pattern: matches the form, and every beginning of it at the end of the text; with the two signs above."""
        self.pattern = pattern
        self._ends: dict[str, str | None] = {}
        """Group that only a whole form sets → the group where what is taken ends; None: all of it."""
        parts, taken = pattern.split("\0"), None
        named = parts[0]
        for number, part in enumerate(parts[1:]):
            name = f"{part[0]}{number}"
            if part[0] == "t":
                taken = name
            else:
                self._ends[name] = taken
            named += f"(?P<{name}>)" + part[1:]
        self.regex = re.compile(named)

    def is_full(self, match: re.Match[str]) -> bool:
        """Whether all of the form is there."""
        return match.lastgroup in self._ends

    def end(self, match: re.Match[str]) -> int:
        """Where what is taken of a whole form ends."""
        assert match.lastgroup is not None
        taken = self._ends[match.lastgroup]
        return match.end() if taken is None else match.end(taken)


def form(*atoms: Atom, ahead: Sequence[Atom] = ()) -> Form:
    """The atoms in this order. ahead: must follow, and is not taken.

    The last atom is no run: where a run ends depends on what comes.
    """
    last = f"{_TAKEN}(?:\\Z|{_chain(ahead, _FULL)})" if ahead else _FULL
    return Form(_chain(atoms, last))


def one_of(*forms: Form) -> Form:
    """Whichever fits first. For forms without a look ahead."""
    return Form("|".join(each.pattern for each in forms))


def _chain(atoms: Sequence[Atom], last: str, *, first: bool = True) -> str:
    """The pattern of atoms, `last` behind them; the text may end before each but the first."""
    if not atoms:
        return last
    atom, rest = atoms[0], atoms[1:]
    if isinstance(atom, Run):
        inner = atom.pattern + _chain(rest, last, first=False)
    elif isinstance(atom, str):
        if not atom:
            return _chain(rest, last, first=first)
        inner = re.escape(atom[0]) + _chain((atom[1:], *rest), last, first=False)
    else:
        inner = "(?:" + "|".join(_chain((each, *rest), last) for each in atom) + ")"
    return inner if first else f"(?:\\Z|{inner})"


class Scanner:
    """The text of one sequence, read from left to right, and the events made of it."""

    __slots__ = ("_bytes_before", "_held", "at", "ended", "is_end", "out", "text")

    def __init__(self, out: Output, is_end: Callable[[], bool] | None = None) -> None:
        self.out = out
        self.is_end = is_end
        """Asked at each mark that would end the thinking, in their order: whether it does. None: the first one does."""
        self.text = ""
        """What has come and was not read before the last piece came."""
        self.at = 0
        """Where reading goes on in `text`."""
        self.ended = False
        """Whether nothing will follow `text`."""
        self._bytes_before = 0
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        """A piece has come."""
        if self.at:
            self._bytes_before += len(self.text[: self.at].encode())
            text, self.at = self.text[self.at :] + text, 0
        elif self.text:
            text = self.text + text
        self.text = text

    def offset(self) -> int:
        """Bytes of UTF-8 that were read."""
        return self._bytes_before + len(self.text[: self.at].encode())

    def take(self, end: int) -> str:
        """The text up to this position."""
        piece = self.text[self.at : end]
        self.at = end
        if self._held is not None:
            self._held.append(piece)
        return piece

    # What was read of something that may turn out to be nothing

    def hold(self) -> None:
        """Remember what is read from here on, until `commit` or `give_back`."""
        self._held = []

    def commit(self) -> None:
        """It was right: what was held is markup."""
        self._held = None

    def give_back(self) -> None:
        """It was nothing: what was held is content."""
        held, self._held = self._held, None
        if held:
            self.out.content("".join(held))

    # Reading

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def accept(self, wanted: Form) -> Steps[str | None]:
        """Take the form, if it comes next. None: nothing is taken."""
        while True:
            match = wanted.regex.match(self.text, self.at)
            if match is not None and wanted.is_full(match):
                return self.take(wanted.end(match))
            if self.ended or (match is None and self.at < len(self.text)):
                return None
            yield

    def expect(self, wanted: Form) -> Steps[str]:
        """Take the form. MalformedError where something else comes."""
        found = yield from self.accept(wanted)
        if found is None:
            raise MalformedError
        return found

    def skip(self, closing: Form) -> Steps[bool]:
        """Take markup that closes something complete, where it comes next, or begins to at the end of the text."""
        found = yield from self.accept(closing)
        if found is None and self.ended:
            match = closing.regex.match(self.text, self.at)
            if match is not None and not match[0].isspace():
                self.take(match.end())
        return found is not None

    def seek(self, wanted: Form, sink: Sink, *, drops_cut: bool = False) -> Steps[str | None]:
        """Text up to the form goes to the sink, the form is taken, and held. None: the text has ended without it.

        drops_cut: a beginning of the form that ends the text is left out, instead of being text.
        """
        while True:
            match = wanted.regex.search(self.text, self.at)
            is_text = match is None or (self.ended and not drops_cut and not wanted.is_full(match))
            start = len(self.text) if match is None or is_text else match.start()
            if start > self.at:
                sink(self.take(start))
            if match is not None and wanted.is_full(match):
                self.hold()
                return self.take(wanted.end(match))
            if self.ended:
                self.take(len(self.text))
                return None
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Everything that follows goes to the sink."""
        while True:
            if self.at < len(self.text):
                sink(self.take(len(self.text)))
            if self.ended:
                return
            yield
