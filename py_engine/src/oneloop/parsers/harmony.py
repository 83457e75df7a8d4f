"""The channels of gpt-oss: thinking, calls and the answer are messages, each with a header that says what it is.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from oneloop.parsers.calls import read_arguments
from oneloop.parsers.formats import ReasoningFormat, ToolFormat, Tools
from oneloop.parsers.scanner import SPACE, MalformedError, Run, form, one_of

if TYPE_CHECKING:
    from oneloop.parsers.scanner import Scanner, Steps

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CALL, _RETURN, _CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_WORDS = Run(r"^<>", 0, 256)
_BEHIND_CHANNEL = (_CHANNEL, _WORDS, (_MESSAGE, _CONSTRAIN))
_FIRST_HEADER = one_of(form(*_BEHIND_CHANNEL), form(SPACE, "to=", _WORDS, *_BEHIND_CHANNEL))
"""The prompt ends in <|start|>assistant."""
_HEADER = form(_START, _WORDS, *_BEHIND_CHANNEL)
_REST_OF_HEADER = form(_WORDS, _MESSAGE)
_CLOSING = form((_END, _CALL, _RETURN))
_CALL_END = form(SPACE, (_CALL, _END))
_RECIPIENT = re.compile(r"to=(functions\.)?([A-Za-z0-9_.:/-]+)")


def _read(scanner: Scanner, tools: Tools) -> Steps[None]:
    """Message after message. What is no message is content."""
    scanner.hold()
    header = yield from scanner.accept(_FIRST_HEADER)
    if header is None:
        scanner.commit()
        header = yield from scanner.seek(_HEADER, scanner.out.content)
    while header is not None:
        try:
            yield from _read_message(scanner, header, tools)
        except MalformedError:
            scanner.give_back()
        header = yield from scanner.seek(_HEADER, scanner.out.content)


def _read_message(scanner: Scanner, header: str, tools: Tools) -> Steps[None]:
    """What is for a function of the client is a call; for anybody else (a tool of the model's own) it is thinking."""
    if header.endswith(_CONSTRAIN):
        header += yield from scanner.expect(_REST_OF_HEADER)
    channel = header.partition(_CHANNEL)[2].split("<")[0].split() or [""]
    recipient = _RECIPIENT.search(header)
    if recipient is not None and tools and (recipient[1] or recipient[2] in tools):
        yield from read_arguments(scanner, recipient[2])
        yield from scanner.skip(_CALL_END)
        return
    if channel[0] != "analysis" and recipient is None:
        scanner.commit()
        scanner.out.separate()
        yield from _text_up_to_end(scanner, is_thinking=False)
        return
    begin = scanner.offset() - len(header.encode())
    scanner.commit()
    scanner.out.begin_reasoning(begin)
    yield from _text_up_to_end(scanner, is_thinking=True)


def _text_up_to_end(scanner: Scanner, *, is_thinking: bool) -> Steps[None]:
    out = scanner.out
    mark = yield from scanner.seek(_CLOSING, out.reasoning if is_thinking else out.content)
    scanner.commit()
    if mark is not None and is_thinking:
        out.end_reasoning(scanner.offset())


TOOLS = ToolFormat(
    name="openai",
    aliases=("gpt_oss", "gptoss", "harmony"),
    recognises=lambda template: _CHANNEL in template and _MESSAGE in template,
    markers=(_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN, _CALL),
    read=_read,
)
REASONING = ReasoningFormat(
    name="openai_gptoss",
    aliases=("gpt_oss", "gptoss", "harmony", "openai"),
    recognises=TOOLS.recognises,
    markers=TOOLS.markers,
    read=lambda scanner, _is_open: _read(scanner, {}),
    end=_END + _START + "assistant" + _CHANNEL + "final" + _MESSAGE,
    read_all=_read,
)
