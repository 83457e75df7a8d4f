"""GLM 4.5: <tool_call>name <arg_key>key</arg_key> <arg_value>value</arg_value> … </tool_call>.

Values are as they stand.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from oneloop.parsers.formats import NAME as FUNCTION
from oneloop.parsers.formats import CallForm, ToolFormat, Tools
from oneloop.parsers.parameters import ArgumentWriter, value_end
from oneloop.parsers.scanner import MAX_NAME_LEN, NAME, SPACE, MalformedError, Run, form
from oneloop.parsers.tagged import KEY, TaggedForm

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_OPENING = form("<tool_call>", SPACE, NAME, ahead=(SPACE, ("<arg_key>", "</tool_call>")))
_KEY = form(SPACE, "<arg_key>", Run("^<>", 1, MAX_NAME_LEN), "</arg_key>", SPACE, "<arg_value>")
_END = form(SPACE, "</tool_call>")
_VALUE_END = value_end("</arg_value>", ahead=(SPACE, ("<arg_key>", "</tool_call>")), trims=False)


def _read(scanner: Scanner, tools: Tools, *, is_exact: bool = False) -> Steps[None]:
    while (opening := (yield from scanner.seek(_OPENING, scanner.out.content))) is not None:
        name = opening.removeprefix("<tool_call>").strip()
        try:
            yield from _read_call(scanner, name, tools, is_exact=is_exact)
        except MalformedError:
            scanner.give_back()


def _read_call(scanner: Scanner, name: str, tools: Tools, *, is_exact: bool) -> Steps[None]:
    key = yield from scanner.accept(_KEY)
    if key is None:
        yield from scanner.expect(_END)
    scanner.commit()
    scanner.out.begin_call(name)
    writer = ArgumentWriter(scanner.out.arguments, tools.get(name, {}), is_exact=is_exact)
    if key is not None:
        while key is not None:
            bare = key.partition("<arg_key>")[2].partition("</arg_key>")[0].strip()
            yield from writer.read_value(scanner, bare, _VALUE_END)
            key = yield from scanner.accept(_KEY)
        yield from scanner.expect(_END)
    writer.close()
    scanner.out.end_call()


def _form(template: str) -> CallForm:
    space = "" if "</arg_key><arg_value>" in template else "\n"  # GLM 4.7 writes no line breaks
    tagged = TaggedForm(
        begin=f"<arg_key>{KEY}</arg_key>{space}<arg_value>",
        end=f"</arg_value>{space}",
        end_tag="</arg_value>",
        keys=re.compile(f"[^<>]{{1,{MAX_NAME_LEN}}}"),
    )
    return CallForm(
        marks=("<tool_call>",),
        begin=f"<tool_call>{FUNCTION}{space}",
        end="</tool_call>",
        separator=space,
        arguments=tagged.arguments,
        read=partial(_read, is_exact=True),
    )


FORMAT = ToolFormat(
    name="glm45",
    aliases=("glm4_moe", "glm47"),
    recognises=lambda template: "<arg_key>" in template and "<arg_value>" in template,
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    read=_read,
    form=_form,
)
