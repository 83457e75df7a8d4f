"""Phi 4 mini: <|tool_call|>{"name": …, "arguments": {…}}<|/tool_call|>, or functools[{…}, …]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_calls
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import SPACE, MalformedError, form

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_BEGIN, _END = "<|tool_call|>", "<|/tool_call|>"
_OPENING = form((_BEGIN, "functools"), ahead=(SPACE, ("[", "{")))
_CLOSING = form(SPACE, _END)


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            yield from read_calls(scanner)
            yield from scanner.skip(_CLOSING)
        except MalformedError:
            scanner.give_back()


FORMAT = ToolFormat(
    name="phi4_mini",
    aliases=("phi4_mini_json",),
    recognises=lambda template: _END in template or "functools[" in template,
    markers=(_BEGIN, _END),
    read=_read,
    form=lambda _: CallForm(
        before_all=f"{_BEGIN}[",
        begin=f'{{"name": "{NAME}", "arguments": ',
        end="}",
        separator=", ",
        after_all=f"]{_END}",
    ),
)
