"""Parameters written as text between tags → JSON, as it comes: strings piece by piece, other values at their end.

What a value is, is said by the function's schema: text between tags looks the same for a number and a string.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop.parsers.json_text import quoted_inside, read_json
from oneloop.parsers.literals import read_literal
from oneloop.parsers.output import Output
from oneloop.parsers.scanner import Form, MalformedError, Scanner, form

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.parsers.scanner import Atom, Sink, Steps

_TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_SCHEMAS = 64
"""Of one parameter, that are looked at."""


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """How a format ends a value."""

    end: Form
    """The end tag; it is held while it is read."""
    null: Form
    """The same, behind a value that is null."""
    trims: bool
    """Whether one line break at either end belongs to the tags."""


def value_end(*end: Atom, ahead: Sequence[Atom] = (), trims: bool) -> ValueEnd:
    """A value that ends with these atoms, when `ahead` follows: else what looks like an end is a part of the value."""
    words = ("\nnull\n", "null") if trims else ("null",)
    return ValueEnd(form(*end, ahead=ahead), form(words, *end, ahead=ahead), trims)


_BREAK = form("\n")


class ArgumentWriter:
    """The arguments of the open call, parameter by parameter."""

    __slots__ = ("_is_exact", "_num_written", "_out", "_properties", "_schema")

    def __init__(self, out: Sink, schema: Mapping[str, Any], *, is_exact: bool = False) -> None:
        """out: takes the arguments' text. schema: of the function's parameters.

        is_exact: values that are no text are JSON, as a grammar has it, and no guess is needed where they end.
        """
        self._is_exact = is_exact
        self._out = out
        self._schema = schema
        properties = schema.get("properties")
        self._properties = properties if type(properties) is dict else {}
        self._num_written = 0

    def read_value(self, scanner: Scanner, key: str, ending: ValueEnd) -> Steps[None]:
        """The parameter's text up to its end. MalformedError when the text ends within."""
        types = allowed_types(self._properties.get(key), self._schema)
        self._out((", " if self._num_written else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_written += 1
        if "null" in types and (yield from scanner.accept(ending.null)) is not None:
            self._out("null")
            return
        pieces: list[str] = []
        is_text = types <= {"string", "null"}
        if is_text:
            self._out('"')
        elif self._is_exact:
            yield from self._read_exactly(scanner, ending)
            return
        write = self._write_quoted if is_text else pieces.append
        sink = _WithoutBreaks(write) if ending.trims else write
        if (yield from scanner.seek(ending.end, sink, drops_cut=True)) is None:
            self._out("".join(pieces))
            raise MalformedError
        scanner.commit()
        self._out('"' if is_text else value_json("".join(pieces), types))

    def _read_exactly(self, scanner: Scanner, ending: ValueEnd) -> Steps[None]:
        """JSON up to its own end, whatever tags its strings hold, and the end tag."""
        if ending.trims:
            yield from scanner.accept(_BREAK)
        if (yield from scanner.peek()) in ("{", "[", '"'):
            yield from read_json(scanner, self._out)
            if ending.trims:
                yield from scanner.accept(_BREAK)
            yield from scanner.expect(ending.end)
            return
        pieces: list[str] = []
        is_whole = (yield from scanner.seek(ending.end, pieces.append, drops_cut=True)) is not None
        self._out("".join(pieces).strip())
        if not is_whole:
            raise MalformedError
        scanner.commit()

    def close(self) -> None:
        """No parameter follows."""
        self._out("}" if self._num_written else "{}")

    def _write_quoted(self, text: str) -> None:
        self._out(quoted_inside(text))


class _WithoutBreaks:
    """A sink before which one line break at the start and one at the end are left out."""

    __slots__ = ("_break", "_has_begun", "_sink")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._has_begun = False
        self._break = ""
        """A line break that is the last one, unless more comes."""

    def __call__(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        if not text:
            return
        body = text.removesuffix("\n")
        head, self._break = self._break, text[len(body) :]
        if head or body:
            self._sink(head + body)


def allowed_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a parameter may have. Empty: nothing is said, so it is taken as text.

    root: the function's schema, to which references lead.
    """
    found: set[str] = set()
    todo, num_seen = [schema], 0
    while todo and num_seen < _MAX_SCHEMAS:
        each = todo.pop()
        num_seen += 1
        if type(each) is not dict:
            continue
        given = each.get("type")
        names = given if type(given) is list else [given]
        found.update(name for name in names if type(name) is str)
        for key in ("anyOf", "oneOf", "allOf"):
            alternatives = each.get(key)
            if type(alternatives) is list:
                todo += alternatives[:_MAX_SCHEMAS]
        if type(each.get("$ref")) is str:
            todo.append(referred(each["$ref"], root))
        values = [each["const"]] if "const" in each else each.get("enum")
        if given is None and type(values) is list:
            found.update(_TYPE_NAMES.get(type(value), "string") for value in values[:_MAX_SCHEMAS])
    if "number" in found:
        found.add("integer")
    return frozenset(found)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema leads to; None for any other."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        if type(place) is not dict:
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place if reference.startswith("#") else None


def value_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value's text: what it says, where that is of an allowed type; else the text as a string."""
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse, parse_int=str, parse_float=float)
    except (ValueError, RecursionError):
        return _literal_json(bare, types) or json.dumps(text, ensure_ascii=False)
    if _type_of(value, bare) in types:
        return bare
    return json.dumps(text, ensure_ascii=False)


def _literal_json(text: str, types: frozenset[str]) -> str | None:
    """JSON of a list or a dict as Python writes it, which some models do; None for anything else."""
    if not (text.startswith("[") and "array" in types) and not (text.startswith("{") and "object" in types):
        return None
    scanner, pieces = Scanner(Output()), list[str]()
    scanner.feed(text)
    scanner.ended = True
    try:
        for _ in read_literal(scanner, pieces.append):
            pass  # it waits for nothing: the text is whole
    except MalformedError:
        return None
    return "".join(pieces) if scanner.at == len(text) else None


def _type_of(value: Any, bare: str) -> str:
    if type(value) is str and not bare.startswith('"'):
        return "integer"  # kept as digits: Python bounds the length of numbers it makes
    return _TYPE_NAMES[type(value)]


def _refuse(_: str) -> None:
    raise ValueError
