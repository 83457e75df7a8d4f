"""Kimi K2: calls in a section, each with an id that holds its name: functions.name:index, a mark, and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.parsers.calls import read_arguments
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import MAX_NAME_LEN, SPACE, MalformedError, Run, form, one_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.parsers.scanner import Scanner, Steps

SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_OPENING = one_of(form(SECTION_BEGIN, SPACE, _BEGIN), form(_BEGIN))
_CALL_ID = Run(r"A-Za-z0-9_.:/\-", 1, MAX_NAME_LEN + 32)
_HEADER = form(SPACE, _CALL_ID, SPACE, _ARGUMENTS)
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


def _arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rest of the id, which the model counts through the conversation, and JSON."""
    index = {"type": "regex", "pattern": "0|[1-9][0-9]{0,3}"}
    mark = {"type": "const_string", "value": _ARGUMENTS}
    return {"type": "sequence", "elements": [index, mark, {"type": "json_schema", "json_schema": schema}]}


_FORM = CallForm(
    marks=(SECTION_BEGIN, _BEGIN),
    before_all=SECTION_BEGIN,
    begin=f"{_BEGIN}functions.{NAME}:",
    arguments=_arguments,
    end=_END,
    after_all=_SECTION_END,
)

FORMAT = ToolFormat(
    name="kimi_k2",
    recognises=lambda template: SECTION_BEGIN in template or "<|im_middle|>" in template,
    markers=(SECTION_BEGIN, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
    read=_read,
    form=lambda _: _FORM,
)
