"""Granite: 3.2 says in words where its thinking and its answer begin, 3.3 writes <think> and <response>."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.formats import ReasoningFormat
from oneloop.parsers.scanner import SPACE, form, one_of

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_HERE = ("Here's ", "Here is ")
_START, _END = "<think>", "</think>"
_TAG = form(SPACE, _START)
_WORDS = form(SPACE, _HERE, "my thought process:")
_ANSWER_WORDS = form(_HERE, "my response:")
_ANSWER_TAG = form(_END)
_EITHER = one_of(_ANSWER_WORDS, _ANSWER_TAG)
_RESPONSE = form(SPACE, "<response>")
_RESPONSE_END = form("</response>")


def _read(scanner: Scanner, is_open: bool) -> Steps[None]:
    mark = yield from scanner.accept(_TAG)
    closing = _ANSWER_TAG
    if mark is None:
        mark = yield from scanner.accept(_WORDS)
        closing = _EITHER if mark is None else _ANSWER_WORDS
    if mark is None and not is_open:
        return
    scanner.out.begin_reasoning(scanner.offset() - len((mark or "").lstrip().encode()))
    if (yield from scanner.seek(closing, scanner.out.reasoning)) is None:
        return
    scanner.commit()
    scanner.out.end_reasoning(scanner.offset())
    if (yield from scanner.accept(_RESPONSE)) is not None:
        yield from scanner.seek(_RESPONSE_END, scanner.out.content)
        scanner.commit()


FORMAT = ReasoningFormat(
    name="granite",
    recognises=lambda template: (
        "<|start_of_role|>" in template and (_END in template or "my thought process" in template)
    ),
    markers=(_START, _END, "<response>", "</response>"),
    read=_read,
    start=_START,
    end=_END,
    also_ends=True,
)
