"""DeepSeek V3 and R1: between marks a type, a name, and arguments in a block of code; V3.1: the name, and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_arguments
from oneloop.parsers.formats import NAME as FUNCTION
from oneloop.parsers.formats import CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import NAME, SPACE, MalformedError, form, one_of

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
_OPENING = one_of(form(_CALLS_BEGIN, SPACE, _BEGIN), form(_BEGIN))
_FENCED = form("function", _SEPARATOR, NAME, SPACE, _FENCE, "json")
_BARE = form(NAME, _SEPARATOR)
_FENCE_END = form(SPACE, _FENCE)
_CALL_END = form(SPACE, _END)
_ALL_END = form(SPACE, _CALLS_END)


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            yield from _read_call(scanner)
        except MalformedError:
            scanner.give_back()


def _read_call(scanner: Scanner) -> Steps[None]:
    header = yield from scanner.accept(_FENCED)
    if header is not None:
        name = header.partition(_SEPARATOR)[2].removesuffix(_FENCE + "json").strip()
    else:
        name = (yield from scanner.expect(_BARE)).removesuffix(_SEPARATOR)
    yield from read_arguments(scanner, name)
    if header is not None:
        yield from scanner.skip(_FENCE_END)
    yield from scanner.skip(_CALL_END)
    yield from scanner.skip(_ALL_END)


def _form(template: str) -> CallForm:
    if f"{_FENCE}json" in template:
        begin, end, separator = f"function{_SEPARATOR}{FUNCTION}\n{_FENCE}json\n", f"\n{_FENCE}", "\n"
    else:
        begin, end, separator = f"{FUNCTION}{_SEPARATOR}", "", ""
    return CallForm(
        marks=(_CALLS_BEGIN, _BEGIN),
        before_all=_CALLS_BEGIN,
        begin=_BEGIN + begin,
        end=end + _END,
        separator=separator,
        after_all=_CALLS_END,
    )


FORMAT = ToolFormat(
    name="deepseek_v3",
    aliases=("deepseek_v31",),
    recognises=lambda template: _SEPARATOR in template,
    markers=(_CALLS_BEGIN, _CALLS_END, _BEGIN, _SEPARATOR, _END),
    read=_read,
    form=_form,
)
