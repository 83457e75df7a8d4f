"""Granite 3: <|tool_call|>[{"name": …, "arguments": {…}}, …]; also <tool_call> in front of such a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_calls
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import SPACE, MalformedError, form

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_MARKS = ("<|tool_call|>", "<tool_call>")
_OPENING = form(_MARKS, ahead=(SPACE, ("[", "{")))


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            yield from read_calls(scanner)
        except MalformedError:
            scanner.give_back()


FORMAT = ToolFormat(
    name="granite",
    recognises=lambda template: "<|start_of_role|>" in template and "<|tool_call|>" in template,
    markers=_MARKS,
    read=_read,
    form=lambda _: CallForm(
        marks=_MARKS,
        before_all=f"{_MARKS[0]}[",
        begin=f'{{"name": "{NAME}", "arguments": ',
        end="}",
        separator=", ",
        after_all="]",
    ),
)
