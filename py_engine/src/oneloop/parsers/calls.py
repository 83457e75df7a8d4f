"""Calls written as JSON: {"name": …, "arguments": {…}}, alone or in a list, and arguments behind a header."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from oneloop.parsers.json_text import read_json, read_short_string
from oneloop.parsers.scanner import SPACE, MalformedError, form

if TYPE_CHECKING:
    from collections.abc import Collection

    from oneloop.parsers.scanner import Scanner, Steps

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
KEYS = ("name", "arguments", "parameters", "id", "type", "function")
"""With one of these a call begins."""
CALL_AHEAD = ("{", SPACE, '"', tuple(f'{key}"' for key in KEYS))
"""What tells a call from other JSON, as a look ahead."""

_OPEN = form(SPACE, "{")
_COLON = form(SPACE, ":", SPACE, ahead=(("{", "[", '"', "n", "t", "f", "-", *"0123456789"),))
_NEXT_KEY = form(SPACE, ",", SPACE, ahead=('"',))
_FIRST_KEY = form(SPACE, ahead=('"',))
_CLOSE = form(SPACE, "}")
_LIST_OPEN = form(SPACE, "[")
_LIST_NEXT = form(SPACE, ",", SPACE, ahead=("{",))
_LIST_CLOSE = form(SPACE, "]")


def read_call(scanner: Scanner, known: Collection[str] | None = None) -> Steps[None]:
    """One object. What was held when it began is committed once its name and the begin of its arguments are there.

    It is complete with its arguments, or with its end where it has none. Members of other names are dropped.
    known: names that a call may have; None: any. MalformedError where it is no call, or not complete.
    """
    call = _Call(scanner, known)
    yield from scanner.expect(_OPEN)
    yield from scanner.expect(_FIRST_KEY)
    while True:
        key = yield from read_short_string(scanner)
        yield from scanner.expect(_COLON)
        if key in ARGUMENT_KEYS:
            yield from call.read_arguments()
        elif key in ("name", "id"):
            yield from call.read_label(key)
        else:
            yield from read_json(scanner, _drop)
        if (yield from scanner.accept(_NEXT_KEY)) is None:
            break
    yield from scanner.expect(_CLOSE)
    call.close()


def read_calls(scanner: Scanner, known: Collection[str] | None = None) -> Steps[None]:
    """One object, or a list of at least one."""
    if (yield from scanner.accept(_LIST_OPEN)) is None:
        yield from read_call(scanner, known)
        return
    yield from read_call(scanner, known)
    scanner.hold()
    while (yield from scanner.accept(_LIST_NEXT)) is not None:
        yield from read_call(scanner, known)
        scanner.hold()
    yield from scanner.expect(_LIST_CLOSE)
    scanner.commit()


def read_arguments(scanner: Scanner, name: str, call_id: str | None = None) -> Steps[None]:
    """The arguments of a call whose header was read and held, which is committed with their begin.

    MalformedError where there are none, or when they are not complete.
    """
    yield from scanner.expect(_FIRST_BRACE)
    scanner.commit()
    scanner.out.begin_call(name, call_id)
    yield from read_json(scanner, scanner.out.arguments)
    scanner.out.end_call()


_FIRST_BRACE = form(SPACE, ahead=("{",))


class _Call:
    """What is known of the object that is being read."""

    __slots__ = ("_arguments", "_id", "_known", "_name", "_scanner", "is_complete")

    def __init__(self, scanner: Scanner, known: Collection[str] | None) -> None:
        self._scanner = scanner
        self._known = known
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self.is_complete = False

    def read_label(self, key: str) -> Steps[None]:
        """The name or the id."""
        value = yield from read_short_string(self._scanner)
        if key == "id":
            self._id = value
            return
        if not value or self._name is not None or (self._known is not None and value not in self._known):
            raise MalformedError
        self._name = value
        if self._arguments is not None:
            self._emit_whole(self._arguments)

    def read_arguments(self) -> Steps[None]:
        """An object; the same as text; or null for none."""
        if self.is_complete or self._arguments is not None:
            raise MalformedError
        first = yield from self._scanner.peek()
        if self._name is not None and first == "{":
            self._scanner.commit()
            self._scanner.out.begin_call(self._name, self._id)
            yield from read_json(self._scanner, self._scanner.out.arguments)
            self._complete()
            return
        pieces: list[str] = []
        yield from read_json(self._scanner, pieces.append)
        arguments = _object_text("".join(pieces), first)
        if self._name is None:
            self._arguments = arguments
        else:
            self._emit_whole(arguments)

    def close(self) -> None:
        """The object has ended."""
        if not self.is_complete:
            if self._name is None:
                raise MalformedError
            self._emit_whole("{}")
        self._scanner.commit()

    def _emit_whole(self, arguments: str) -> None:
        assert self._name is not None
        self._scanner.commit()
        out = self._scanner.out
        out.begin_call(self._name, self._id)
        out.arguments(arguments)
        self._complete()

    def _complete(self) -> None:
        self._scanner.out.end_call()
        self.is_complete = True
        self._scanner.hold()


def _object_text(value: str, first: str) -> str:
    """The text of an object of a JSON value that is one, or holds one as text, or is null."""
    if first == "{":
        return value
    if first == "n":
        return "{}"
    try:
        inner = json.loads(value)
        if first == '"' and type(json.loads(inner)) is dict:
            return str(inner).strip()
    except (ValueError, RecursionError):
        pass
    raise MalformedError


def _drop(_: str) -> None:
    """Members that mean nothing here."""
