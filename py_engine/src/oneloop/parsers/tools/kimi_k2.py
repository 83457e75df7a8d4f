"""Kimi K2: calls in a section, each with an id that holds its name: functions.name:index, a mark, and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_arguments
from oneloop.parsers.formats import ToolFormat, Tools
from oneloop.parsers.scanner import NAME, SPACE, MalformedError, form, one_of

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_OPENING = one_of(form(SECTION_BEGIN, SPACE, _BEGIN), form(_BEGIN))
_HEADER = form(SPACE, NAME, SPACE, _ARGUMENTS)
_CALL_END = form(SPACE, _END)
_ALL_END = form(SPACE, _SECTION_END)


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            header = yield from scanner.expect(_HEADER)
            call_id = header.removesuffix(_ARGUMENTS).strip()
            yield from read_arguments(scanner, _name(call_id), call_id)
            yield from scanner.skip(_CALL_END)
            yield from scanner.skip(_ALL_END)
        except MalformedError:
            scanner.give_back()


def _name(call_id: str) -> str:
    name, _, index = call_id.rpartition(":")
    return (name if index.isdigit() and name else call_id).removeprefix("functions.")


FORMAT = ToolFormat(
    name="kimi_k2",
    recognises=lambda template: SECTION_BEGIN in template or "<|im_middle|>" in template,
    markers=(SECTION_BEGIN, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
    read=_read,
)
