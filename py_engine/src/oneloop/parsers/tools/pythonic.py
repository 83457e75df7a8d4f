"""Pythonic calls: [name(key=literal, …), …] as all of the answer; Llama 4 may put <|python_start|> around it.

Nothing but its place marks such a list, so its first call must name one of the request's functions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from oneloop.parsers.arguments import arguments_of, keywords
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.literals import next_character, read_literal, take_character
from oneloop.parsers.scanner import MAX_NAME_LEN, SPACE, MalformedError, Run, form

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from oneloop.parsers.arguments import Schema
    from oneloop.parsers.scanner import Scanner, Steps

_START, _END = "<|python_start|>", "<|python_end|>"
_WORD = Run(r"A-Za-z0-9_.\-", 1, MAX_NAME_LEN)
_AT_START = form(SPACE, "[", SPACE, ahead=(_WORD, SPACE, "("))
_BEHIND_MARK = form(_START, SPACE, "[", SPACE, ahead=(_WORD, SPACE, "("))
_CALL = form(SPACE, _WORD, SPACE, "(")
_KEY = form(SPACE, _WORD, SPACE, "=")
_CLOSING = form(SPACE, _END)
_KEYWORD = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_LEN}}}")
_WORDS = {"boolean": "True|False", "null": "None"}
"""By type."""


def _read(scanner: Scanner, tools: Tools) -> Steps[None]:
    scanner.hold()
    found = yield from scanner.accept(_AT_START)
    if found is None:
        scanner.commit()
        found = yield from scanner.seek(_BEHIND_MARK, scanner.out.content)
    while found is not None:
        try:
            yield from _read_list(scanner, tools)
            yield from scanner.skip(_CLOSING)
        except MalformedError:
            scanner.give_back()
        found = yield from scanner.seek(_BEHIND_MARK, scanner.out.content)


def _read_list(scanner: Scanner, tools: Tools) -> Steps[None]:
    while True:
        name = (yield from scanner.expect(_CALL))[:-1].strip()
        if name not in tools:
            raise MalformedError
        yield from _read_arguments(scanner, name)
        scanner.hold()
        if not (yield from take_character(scanner, ",")):
            break
        if (yield from next_character(scanner)) == "]":
            break
    if not (yield from take_character(scanner, "]")):
        raise MalformedError
    scanner.commit()


def _read_arguments(scanner: Scanner, name: str) -> Steps[None]:
    """The keywords up to the closing parenthesis. The call begins once its first value does, or has none."""
    out, num_written = scanner.out, 0
    while not (yield from take_character(scanner, ")")):
        key = (yield from scanner.expect(_KEY))[:-1].strip()
        yield from next_character(scanner)
        if not num_written:
            scanner.commit()
            out.begin_call(name)
        out.arguments((", " if num_written else "{") + f'"{key}": ')
        num_written += 1
        yield from read_literal(scanner, out.arguments)
        if not (yield from take_character(scanner, ",")):
            if not (yield from take_character(scanner, ")")):
                raise MalformedError
            break
    if not num_written:
        scanner.commit()
        out.begin_call(name)
    out.arguments("}" if num_written else "{}")
    out.end_call()


def _form(template: str) -> CallForm:
    before, after = (_START, _END) if _START in template else ("", "")
    return CallForm(
        looks=_looks,
        bare_marks=(_START,),
        before_all=before + "[",
        begin=f"{NAME}(",
        arguments=_arguments,
        end=")",
        separator=", ",
        after_all="]" + after,
        names=_KEYWORD,
    )


def _looks(names: Collection[str]) -> str:
    """A list whose first call is of one of them."""
    space, known = r"[ \t\r\n]*", "|".join(map(re.escape, names))
    return rf"{space}\[{space}(?:{known}){space}\("


def _arguments(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = arguments_of(schema)
    if found is None or not all(_KEYWORD.fullmatch(each.name) for each in found):
        return None
    members = [
        {
            "begin": f"{each.name}=",
            "content": _literal(each.schema),
            "end": "",
            "required": each.is_required,
        }
        for each in found
    ]
    return {"type": "members_with_separator", "members": members, "separator": ", "}


def _literal(schema: Schema) -> Mapping[str, Any]:
    """A value in Python's words. Within lists and dicts, and beside other keywords, JSON's are left: `read_literal`
    knows both.
    """
    whole = {"type": "json_schema", "json_schema": schema}
    if type(schema) is bool or keywords(schema) != {"type"}:
        return whole
    given = schema["type"]
    names = [name for name in given if type(name) is str] if type(given) is list else [given]
    words = "|".join(_WORDS[name] for name in names if name in _WORDS)
    if not words:
        return whole
    others = [name for name in names if name not in _WORDS]
    in_words = {"type": "regex", "pattern": words}
    if not others:
        return in_words
    rest = {"type": "json_schema", "json_schema": {**schema, "type": others}}
    return {"type": "or", "elements": [in_words, rest]}


FORMAT = ToolFormat(
    name="pythonic",
    aliases=("llama4_pythonic",),
    recognises=lambda template: _START in template or "func_name1(params_name1" in template,
    markers=(_START, _END),
    read=_read,
    form=_form,
)
