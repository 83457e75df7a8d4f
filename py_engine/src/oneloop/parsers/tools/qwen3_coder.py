"""Qwen 3 Coder: <tool_call> <function=name> <parameter=key> value </parameter> … </function> </tool_call>.

Values are text as it stands, a line break around it. An end tag that is not followed by another tag is text as well.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from oneloop.parsers.formats import NAME, CallForm, ToolFormat, Tools
from oneloop.parsers.parameters import ArgumentWriter, value_end
from oneloop.parsers.scanner import MAX_NAME_LEN, SPACE, MalformedError, Run, form, one_of
from oneloop.parsers.tagged import KEY, TaggedForm

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_TAG_NAME = Run(r"^<>\n", 1, MAX_NAME_LEN)
_OPENING = one_of(
    form("<tool_call>", SPACE, "<function=", _TAG_NAME, ">"), form("<function=", _TAG_NAME, ">")
)
_PARAMETER = form(SPACE, "<parameter=", _TAG_NAME, ">")
_END = form(SPACE, ("</function>", "</tool_call>"))
_CLOSING = form(SPACE, "</tool_call>")
_VALUE_END = value_end(
    "</parameter>", ahead=(SPACE, ("<parameter=", "</function>", "</tool_call>")), trims=True
)


def _read(scanner: Scanner, tools: Tools, *, is_exact: bool = False) -> Steps[None]:
    while (opening := (yield from scanner.seek(_OPENING, scanner.out.content))) is not None:
        name = opening.partition("<function=")[2][:-1].strip()
        try:
            yield from _read_call(scanner, name, tools, is_exact=is_exact)
        except MalformedError:
            scanner.give_back()


def _read_call(scanner: Scanner, name: str, tools: Tools, *, is_exact: bool) -> Steps[None]:
    tag = yield from scanner.accept(_PARAMETER)
    end = None if tag is not None else (yield from scanner.expect(_END))
    scanner.commit()
    scanner.out.begin_call(name)
    writer = ArgumentWriter(scanner.out.arguments, tools.get(name, {}), is_exact=is_exact)
    while tag is not None:
        key = tag.partition("=")[2][:-1].strip()
        yield from writer.read_value(scanner, key, _VALUE_END)
        tag = yield from scanner.accept(_PARAMETER)
    if end is None:
        end = yield from scanner.expect(_END)
    writer.close()
    scanner.out.end_call()
    if "</function>" in end:
        yield from scanner.skip(_CLOSING)


_TAGGED = TaggedForm(
    begin=f"<parameter={KEY}>\n",
    end="\n</parameter>\n",
    end_tag="</parameter>",
    keys=re.compile(rf"[^<>\n]{{1,{MAX_NAME_LEN}}}"),
)
_FORM = CallForm(
    marks=("<tool_call>", "<function="),
    begin=f"<tool_call>\n<function={NAME}>\n",
    end="</function>\n</tool_call>",
    separator="\n",
    arguments=_TAGGED.arguments,
    read=partial(_read, is_exact=True),
)

FORMAT = ToolFormat(
    name="qwen3_coder",
    aliases=("qwen3_xml", "step3p5", "mimo"),
    recognises=lambda template: all(tag in template for tag in ("<tool_call>", "<function=", "<parameter=")),
    markers=("<tool_call>", "</tool_call>"),
    read=_read,
    form=lambda _: _FORM,
)
