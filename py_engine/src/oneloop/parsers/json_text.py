"""JSON in a text that is still coming: checked, passed on as it comes, and known where it ends.

Every character is looked at by one of a few expressions; a run of plain members is one match.
"""

from __future__ import annotations

import json
import re
from enum import IntEnum, auto
from typing import TYPE_CHECKING

import orjson

from oneloop.parsers.scanner import MAX_NAME_LEN, MalformedError, Scanner

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Sink, Steps

MAX_DEPTH = 128
_MAX_SCALAR_LEN = 512
"""More characters than a number may have: it is only known at its end."""

_WS = r"[ \t\r\n]*+"
_PLAIN = r'[^"\\\x00-\x1f]'
_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_INSIDE = rf"{_PLAIN}*+(?:{_ESCAPE}{_PLAIN}*+)*+"
_STRING = f'"{_INSIDE}"'
_NUMBER = r"-?(?:0|[1-9][0-9]{0,300}+)(?:\.[0-9]{1,150}+)?(?:[eE][+-]?[0-9]{1,50}+)?"
_SCALAR = rf"(?:true|false|null|{_NUMBER})(?=[ \t\r\n,\]}}])"
_SIMPLE = rf"(?:{_STRING}|{_SCALAR}|\[\]|\{{\}})"
_FLAT = (
    rf"(?:{_SIMPLE}|\[{_WS}{_SIMPLE}(?:{_WS},{_WS}{_SIMPLE})*+{_WS}\]"
    rf"|\{{{_WS}{_STRING}{_WS}:{_WS}{_SIMPLE}(?:{_WS},{_WS}{_STRING}{_WS}:{_WS}{_SIMPLE})*+{_WS}\}})"
)
"""A value that nests two levels at most."""


class _Wanted(IntEnum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


_VALUE = rf"(?P<open>[{{\[])|(?P<quote>\")|(?P<scalar>{_SCALAR})"
_NEXT = {
    _Wanted.VALUE: re.compile(f"{_WS}(?:{_VALUE})"),
    _Wanted.VALUE_OR_END: re.compile(rf"{_WS}(?:{_VALUE}|(?P<close>\]))"),
    _Wanted.KEY: re.compile(f'{_WS}(?P<quote>")'),
    _Wanted.KEY_OR_END: re.compile(rf'{_WS}(?:(?P<quote>")|(?P<close>\}}))'),
    _Wanted.COLON: re.compile(f"{_WS}(?P<colon>:)"),
    _Wanted.COMMA_OR_END: re.compile(rf"{_WS}(?:(?P<comma>,)|(?P<close>[\]}}]))"),
}
_KEY = rf"{_WS}{_STRING}{_WS}:"
_SEPARATOR = {"]": f"{_WS},", "}": f"{_WS},{_KEY}"}
_RUN = {
    closer: re.compile(
        rf"(?:{separator}{_WS}{_FLAT})*+"  # whole members behind another one
        rf"(?:(?P<close>{_WS}[\]}}])|(?P<open>{separator}{_WS}[{{\[]))?+"
    )
    for closer, separator in _SEPARATOR.items()
}
_FIRST = {
    "]": re.compile(rf"(?:(?P<value>{_WS}{_SIMPLE})|(?P<open>{_WS}[{{\[]))"),
    "}": re.compile(rf"(?:(?P<value>{_KEY}{_WS}{_SIMPLE})|(?P<open>{_KEY}{_WS}[{{\[]))"),
}
_STRING_INSIDE = re.compile(_INSIDE)
_SPACE = re.compile(_WS)
_CUT_SCALAR = re.compile(
    r"(?:-?[0-9][0-9.eE+\-]*+|-|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?)\Z"
)
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}+)?\Z")
_SHORT_STRING = re.compile(_STRING)
_CUT_STRING = re.compile(rf'"{_INSIDE}(?:\\(?:u[0-9a-fA-F]{{0,3}}+)?)?\Z')
_CLOSERS = {"{": "}", "[": "]"}


def read_json(scanner: Scanner, sink: Sink) -> Steps[None]:
    """One JSON value, its text to the sink as it comes. MalformedError as soon as it is none, or is cut off.

    What models get wrong most is put right: control characters in strings are written as JSON wants them. A number
    alone ends with what follows it, so it must stand in an array or an object.
    """
    closers: list[str] = []
    wanted = _Wanted.VALUE
    while True:
        if closers:
            end, wanted = _stride(scanner.text, scanner.at, closers, wanted)
            if end > scanner.at:
                sink(scanner.take(end))
            if not closers:
                return
        text, at = scanner.text, scanner.at
        match = _NEXT[wanted].match(text, at)
        if match is None:
            yield from _more(scanner, sink, wanted)
            continue
        sink(scanner.take(match.end()))
        match match.lastgroup:
            case "open":
                if len(closers) == MAX_DEPTH:
                    raise MalformedError
                closers.append(_CLOSERS[text[match.end() - 1]])
                wanted = _Wanted.KEY_OR_END if closers[-1] == "}" else _Wanted.VALUE_OR_END
                continue
            case "quote":
                yield from _string_inside(scanner, sink)
                if wanted in (_Wanted.KEY, _Wanted.KEY_OR_END):
                    wanted = _Wanted.COLON
                    continue
            case "colon":
                wanted = _Wanted.VALUE
                continue
            case "comma":
                wanted = _Wanted.KEY if closers[-1] == "}" else _Wanted.VALUE
                continue
            case "close":
                if closers.pop() != text[match.end() - 1]:
                    raise MalformedError
        if not closers:
            return
        wanted = _Wanted.COMMA_OR_END


def _stride(text: str, at: int, closers: list[str], wanted: _Wanted) -> tuple[int, _Wanted]:
    """As far as whole members and brackets go: where that is, and what is wanted there. Changes `closers`.

    What it does not know, it leaves. It may stop wherever one value ends, or the first one of a bracket is to come.
    """
    while True:
        if len(closers) >= MAX_DEPTH - 1:
            return at, wanted
        if wanted in (_Wanted.KEY_OR_END, _Wanted.VALUE_OR_END):
            match = _FIRST[closers[-1]].match(text, at)
            if match is None:
                return at, wanted
        elif wanted is _Wanted.COMMA_OR_END:
            match = _RUN[closers[-1]].match(text, at)
            assert match is not None
        else:
            return at, wanted
        kind = match.lastgroup
        if kind == "close":
            if text[match.end() - 1] != closers[-1]:
                return match.start("close"), _Wanted.COMMA_OR_END
            closers.pop()
            at, wanted = match.end(), _Wanted.COMMA_OR_END
            if not closers:
                return at, wanted
        elif kind == "open":
            closers.append(_CLOSERS[text[match.end() - 1]])
            at = match.end()
            wanted = _Wanted.KEY_OR_END if closers[-1] == "}" else _Wanted.VALUE_OR_END
        else:
            at = match.end()
            if wanted is _Wanted.COMMA_OR_END:
                return at, wanted
            wanted = _Wanted.COMMA_OR_END


def _more(scanner: Scanner, sink: Sink, wanted: _Wanted) -> Steps[None]:
    """Wait for more text, where more could help."""
    text = scanner.text
    space = _SPACE.match(text, scanner.at)
    assert space is not None
    if space.end() > scanner.at:  # first, so that it is the value's however the text was cut
        sink(scanner.take(space.end()))
    if scanner.ended:
        raise MalformedError
    if scanner.at < len(text) and (
        wanted not in (_Wanted.VALUE, _Wanted.VALUE_OR_END)
        or len(text) - scanner.at > _MAX_SCALAR_LEN
        or _CUT_SCALAR.match(text, scanner.at) is None
    ):
        raise MalformedError
    yield


def _string_inside(scanner: Scanner, sink: Sink) -> Steps[None]:
    """The inside of a string, and its closing quote."""
    while True:
        text = scanner.text
        match = _STRING_INSIDE.match(text, scanner.at)
        assert match is not None
        end = match.end()
        if end < len(text) and text[end] == '"':
            sink(scanner.take(end + 1))
            return
        if end > scanner.at:
            sink(scanner.take(end))
        if end < len(text) and text[end] < " ":
            sink(json.dumps(scanner.take(end + 1))[1:-1])
            continue
        if scanner.ended or (end < len(text) and _CUT_ESCAPE.match(text, end) is None):
            raise MalformedError
        yield


def read_short_string(scanner: Scanner) -> Steps[str]:
    """A JSON string of at most MAX_NAME_LEN characters, decoded: a key, a name. MalformedError for anything else."""
    while True:
        match = _SHORT_STRING.match(scanner.text, scanner.at)
        if match is not None:
            if match.end() - scanner.at > MAX_NAME_LEN + 2:
                raise MalformedError
            return str(json.loads(scanner.take(match.end())))
        is_cut = _CUT_STRING.match(scanner.text, scanner.at) is not None or scanner.at == len(scanner.text)
        if scanner.ended or not is_cut or len(scanner.text) - scanner.at > MAX_NAME_LEN + 2:
            raise MalformedError
        yield


def quoted_inside(text: str) -> str:
    """A piece of a string as it stands between JSON's quotes."""
    return orjson.dumps(text)[1:-1].decode()
