"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} per call (from v11 on)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_arguments, read_calls
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import MAX_NAME_LEN, SPACE, MalformedError, Run, form, one_of

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = Run(r"A-Za-z0-9_.:/\-", 1, MAX_NAME_LEN)
_OPENING = form(_MARK)
_LIST = form(SPACE, ahead=("[", SPACE, "{"))
_HEADERS = one_of(
    form(SPACE, _WORD, _ARGUMENTS),
    form(SPACE, _WORD, _ID, _WORD, _ARGUMENTS),
)
_BARE_HEADER = form(SPACE, _WORD, ahead=("{",))
_ID_LEN = 9


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            if (yield from scanner.accept(_LIST)) is not None:
                yield from read_calls(scanner)
                continue
            header = yield from scanner.accept(_HEADERS)
            if header is None:
                header = yield from scanner.expect(_BARE_HEADER)
            name, _sign, call_id = header.strip().removesuffix(_ARGUMENTS).partition(_ID)
            yield from read_arguments(scanner, name, call_id or None)
        except MalformedError:
            scanner.give_back()


def _form(template: str) -> CallForm:
    if _ARGUMENTS in template:
        return CallForm(marks=(_MARK,), begin=f"{_MARK}{NAME}{_ARGUMENTS}", end="")
    call = f'{{"name": "{NAME}", "arguments": '
    return CallForm(
        marks=(_MARK,), before_all=f"{_MARK}[", begin=call, end="}", separator=", ", after_all="]"
    )


FORMAT = ToolFormat(
    name="mistral",
    recognises=lambda template: _MARK in template,
    markers=(_MARK, _ID, _ARGUMENTS),
    read=_read,
    form=_form,
    call_id=lambda number: number[:_ID_LEN],  # its templates take ids of nine letters and digits only
)
