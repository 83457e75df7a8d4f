"""Llama 3: {"name": …, "parameters": {…}}; {…} as all of the answer, or behind <|python_tag|>.

Nothing but its place marks such a call, so it must name one of the request's functions: an answer in JSON stays one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from oneloop.parsers.calls import CALL_AHEAD, KEYS, read_call
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import SPACE, MalformedError, form

if TYPE_CHECKING:
    from collections.abc import Collection

    from oneloop.parsers.scanner import Scanner, Steps

_TAG = "<|python_tag|>"
_AT_START = form(SPACE, ahead=CALL_AHEAD)
_BEHIND_TAG = form(_TAG, ahead=(SPACE, *CALL_AHEAD))
_NEXT = form(SPACE, (";", ","), ahead=(SPACE, *CALL_AHEAD))


def _read(scanner: Scanner, tools: Tools) -> Steps[None]:
    scanner.hold()
    found = yield from scanner.accept(_AT_START)
    if found is None:
        scanner.commit()
        found = yield from scanner.seek(_BEHIND_TAG, scanner.out.content)
    while found is not None:
        try:
            yield from read_call(scanner, tools)
            scanner.hold()
            while (yield from scanner.accept(_NEXT)) is not None:
                yield from read_call(scanner, tools)
                scanner.hold()
            scanner.commit()
        except MalformedError:
            scanner.give_back()
        found = yield from scanner.seek(_BEHIND_TAG, scanner.out.content)


def _recognises(template: str) -> bool:
    plain = template.replace("\\", "")
    if "<function=" in template:
        return False
    return "<|start_header_id|>" in template and ('"parameters"' in plain or "<|python_tag|>" in template)


def _looks(names: Collection[str]) -> str:
    """An object with a key of a call in front, but for one that begins with the name of something else."""
    space = r"[ \t\r\n]*"
    known = "|".join(re.escape(name) + '"' for name in names)
    name = rf'name"{space}:{space}"(?:{known}|[^"\\]*\\)'  # with an escape it may be any
    others = "|".join(f'{key}"' for key in KEYS if key != "name")
    return rf'{space}\{{{space}"(?:{name}|{others})'


FORMAT = ToolFormat(
    name="llama3_json",
    aliases=("llama3", "llama4_json"),
    recognises=_recognises,
    markers=(_TAG,),
    read=_read,
    form=lambda _: CallForm(
        looks=_looks,
        bare_marks=(_TAG,),
        begin=f'{{"name": "{NAME}", "parameters": ',
        end="}",
        separator="; ",
    ),
)
