"""Python literals → JSON, as they come. Read, never evaluated: words, numbers, strings, lists, tuples and dicts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from oneloop.parsers.json_text import quoted_inside
from oneloop.parsers.scanner import MalformedError

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Sink, Steps

MAX_DEPTH = 64
_MAX_WORD_LEN = 512
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD = re.compile(r"[A-Za-z0-9_.+\-]{1,512}+")
_SPACE = re.compile(r"[ \t\r\n]*+")
_INTEGER = re.compile(r"([+-]?)((?:[1-9][0-9]*+|0)(?:_[0-9]++)*+)")
_FLOAT = re.compile(r"([+-]?)([0-9]*+)(?:\.([0-9]*+))?([eE][+-]?[0-9]++)?")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPE = re.compile(
    r"\\(?:([^xuUN0-7])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3}+)(?!\Z))", re.DOTALL
)
_CUT_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}+|U[0-9a-fA-F]{0,7}+|[0-7]{1,3}+)?\Z")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_PLAIN = {quote: re.compile(rf"[^\\\n{quote}]++") for quote in "\"'"}


def read_literal(scanner: Scanner, sink: Sink, depth: int = 0) -> Steps[None]:
    """One literal, its JSON to the sink. MalformedError where it is none, or is cut off. Tuples become arrays."""
    if depth > MAX_DEPTH:
        raise MalformedError
    first = yield from next_character(scanner)
    if first in _PLAIN and first:
        sink('"')
        yield from _string_inside(scanner, sink)
        sink('"')
    elif first in _CLOSERS and first:
        scanner.take(scanner.at + 1)
        yield from _members(scanner, sink, _CLOSERS[first], depth)
    else:
        sink(_word_json((yield from _word(scanner))))


def next_character(scanner: Scanner) -> Steps[str]:
    """The next one that is no white space, which is not taken; "" at the end."""
    while True:
        space = _SPACE.match(scanner.text, scanner.at)
        assert space is not None
        if space.end() > scanner.at:
            scanner.take(space.end())
        if scanner.at < len(scanner.text):
            return scanner.text[scanner.at]
        if scanner.ended:
            return ""
        yield


def take_character(scanner: Scanner, wanted: str) -> Steps[bool]:
    """Take it, if it comes next behind white space."""
    found = (yield from next_character(scanner)) == wanted
    if found:
        scanner.take(scanner.at + 1)
    return found


def _members(scanner: Scanner, sink: Sink, closer: str, depth: int) -> Steps[None]:
    """The inside of a list, tuple or dict, and its end."""
    is_dict = closer == "}"
    sink("{" if is_dict else "[")
    separator = ""
    while True:
        following = yield from next_character(scanner)
        if following == closer:
            scanner.take(scanner.at + 1)
            break
        if not following:
            raise MalformedError
        sink(separator)
        if is_dict:
            yield from _key(scanner, sink)
        yield from read_literal(scanner, sink, depth + 1)
        separator = ", "
        if not (yield from take_character(scanner, ",")):
            if not (yield from take_character(scanner, closer)):
                raise MalformedError
            break
    sink("}" if is_dict else "]")


def _key(scanner: Scanner, sink: Sink) -> Steps[None]:
    """A key and its colon. What is no string becomes one: JSON has no other keys."""
    first = yield from next_character(scanner)
    sink('"')
    if first in _PLAIN and first:
        yield from _string_inside(scanner, sink)
    else:
        sink(_word_json((yield from _word(scanner))))
    sink('": ')
    if not (yield from take_character(scanner, ":")):
        raise MalformedError


def _word(scanner: Scanner) -> Steps[str]:
    """A name or a number, once it is known where it ends."""
    while True:
        match = _WORD.match(scanner.text, scanner.at)
        if match is None and scanner.at < len(scanner.text):
            raise MalformedError
        if match is not None and match.end() < len(scanner.text):
            if match.end() - scanner.at >= _MAX_WORD_LEN:
                raise MalformedError
            _word_json(match[0])  # before it is taken: what is no literal is text
            return scanner.take(match.end())
        if scanner.ended or (match is not None and match.end() - scanner.at >= _MAX_WORD_LEN):
            raise MalformedError
        yield


def _word_json(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    match = _INTEGER.fullmatch(word)
    if match is not None:
        return match[1].replace("+", "") + match[2].replace("_", "")
    match = _FLOAT.fullmatch(word)
    if match is None or not (match[2] or match[3]):
        raise MalformedError
    sign, whole, part, power = match.groups()
    if part is None and power is None:
        raise MalformedError  # 007
    whole = (whole or "").lstrip("0") or "0"
    return sign.replace("+", "") + f"{whole}.{part or '0'}" + (power or "")


def _string_inside(scanner: Scanner, sink: Sink) -> Steps[None]:
    """A quoted string, as it stands between JSON's quotes."""
    quote = scanner.take(scanner.at + 1)
    plain = _PLAIN[quote]
    while True:
        text = scanner.text
        match = plain.match(text, scanner.at)
        if match is not None:
            sink(quoted_inside(scanner.take(match.end())))
        if scanner.at < len(text):
            if text[scanner.at] == quote:
                scanner.take(scanner.at + 1)
                return
            if text[scanner.at] == "\n":  # models break lines in strings, which Python would not take
                sink(quoted_inside(scanner.take(scanner.at + 1)))
                continue
            escape = _ESCAPE.match(text, scanner.at)
            if escape is not None:
                scanner.take(escape.end())
                sink(_unescaped(escape))
                continue
            if _CUT_ESCAPE.match(text, scanner.at) is None:
                sink("\\\\")  # as Python has it: a backslash before anything else is one
                scanner.take(scanner.at + 1)
                continue
        if scanner.ended:
            raise MalformedError
        yield


def _unescaped(escape: re.Match[str]) -> str:
    """What an escape stands for, as JSON writes it. Halves of surrogate pairs stay escaped: JSON has them, too."""
    character, two, four, eight, octal = escape.groups()
    if character is not None:
        if character in "\\'\"":
            return quoted_inside(character)
        return quoted_inside(_ESCAPED.get(character, "\\" + character))
    code = int(octal, 8) if octal is not None else int(two or four or eight, 16)
    if code > 0x10FFFF:
        raise MalformedError
    return json.dumps(chr(code))[1:-1]
