"""Hermes, Qwen 2.5 and 3, and many others: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.calls import CALL_AHEAD, read_call
from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.scanner import SPACE, MalformedError, form

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_OPENING = form("<tool_call>", ahead=(SPACE, *CALL_AHEAD))
_CLOSING = form(SPACE, "</tool_call>")


def _read(scanner: Scanner, _: Tools) -> Steps[None]:
    while (yield from scanner.seek(_OPENING, scanner.out.content)) is not None:
        try:
            yield from read_call(scanner)
            yield from scanner.skip(_CLOSING)
        except MalformedError:
            scanner.give_back()


def _recognises(template: str) -> bool:
    return (
        "<tool_call>" in template
        and '"arguments"' in template.replace("\\", "")
        and "<tool_calls>" not in template
        and "<function=" not in template
        and "<arg_key>" not in template
    )


FORMAT = ToolFormat(
    name="hermes",
    aliases=("qwen", "qwen25", "qwen2_5", "qwen3", "granite4"),
    recognises=_recognises,
    markers=("<tool_call>", "</tool_call>"),
    read=_read,
    form=lambda _: CallForm(
        marks=("<tool_call>",),
        begin=f'<tool_call>\n{{"name": "{NAME}", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
    ),
)
