"""Mistral's models: their templates refuse what every client sends, so messages are first brought into their form.

As mistral-common does it: neighbours of one role become one turn, texts two line breaks apart; all system texts stand
at the head; a call's id is nine letters and digits, the same in the call and in its answer.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from oneloop.tokenize.renderers.hf import template_writer
from oneloop.tokenize.renderers.kind import RendererKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.tokenize.conversation import Message
    from oneloop.tokenize.tokenizer import Tokenizer

_ID_LEN = 9
_ID = re.compile(rf"[A-Za-z0-9]{{{_ID_LEN}}}")
_SYSTEM = ("system", "developer")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def adapt(messages: Sequence[Message]) -> list[Message]:
    """The messages as Mistral's templates take them. Same messages, same result."""
    heads = [message for message in messages if message.role in _SYSTEM and message.text]
    turns = [_with_ids(message) for message in messages if message.role not in _SYSTEM]
    found = [] if not heads else [_merged([replace(message, role="system") for message in heads])]
    for role, group in groupby(turns, key=lambda message: message.role):
        neighbours = list(group)
        # every call has an answer of its own
        found += neighbours if role in ("tool", "function") else [_merged(neighbours)]
    return _with_names(found)


def call_id(given: str | None) -> str:
    """An id of the form that Mistral's models read; one that has it stays as it is."""
    if given is not None and _ID.fullmatch(given):
        return given
    number = int.from_bytes(hashlib.sha256((given or "").encode("utf-8", "replace")).digest()[:8], "big")
    digits = []
    for _ in range(_ID_LEN):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


def _merged(messages: Sequence[Message]) -> Message:
    """One turn of several of one role. A turn alone keeps its parts."""
    if len(messages) == 1:
        return messages[0]
    thoughts = [message.reasoning for message in messages if message.reasoning]
    return replace(
        messages[0],
        content="\n\n".join(message.text for message in messages if message.text),
        reasoning="\n\n".join(thoughts) or None,
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def _with_ids(message: Message) -> Message:
    calls = tuple(replace(call, id=call_id(call.id)) for call in message.tool_calls)
    if message.role not in ("tool", "function"):
        return replace(message, tool_calls=calls)
    return replace(message, role="tool", tool_call_id=call_id(message.tool_call_id))


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Older templates print the function's name with its answer, which clients leave out."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [
        replace(message, name=names.get(message.tool_call_id))
        if message.role == "tool" and message.name is None
        else message
        for message in messages
    ]


def _recognises(tokenizer: Tokenizer) -> bool:
    """Its control tokens are tokens. (Llama 2's template has the same words as plain text.)"""
    return all(tokenizer.token_id(token) is not None for token in ("[INST]", "[/INST]"))


kind = RendererKind("mistral", _recognises, lambda tokenizer: template_writer(tokenizer, adapt))
