"""Chat messages as clients send them → as chat templates read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_NAME_LEN,
    MAX_TEMPLATE_ARGUMENT_BYTES,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TOOL_CALLS,
)
from oneloop.api.protocol.fields import Fields, shown
from oneloop.tokenize.messages import ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence

RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        "messages", "conversation", "chat_template", "template", "tokenize", "tools", "documents", "padding",
        "truncation", "max_length", "return_dict", "return_tensors", "return_assistant_tokens_mask",
        "add_generation_prompt", "continue_final_message", "add_special_tokens", "tokenizer_kwargs",
        "processor_kwargs", "conversations", "bos_token", "eos_token", "raise_exception", "strftime_now", "namespace",
        "self", "loop",
    }
)  # fmt: skip
_ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_THOUGHT = "thinking"
_TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
    _THOUGHT: "thinking",
}
"""Kind of a content part → where its text is."""


def read_messages(value: object, ignored: list[str] | None = None) -> list[dict[str, Any]]:
    """A conversation: at least one message, every content text or a list of text parts (never None).

    ignored: gets the names of what has no effect.
    """
    fields = Fields({"messages": value})
    messages = fields.array("messages", at_most=MAX_MESSAGES)
    if not messages:
        raise fields.refuse("messages", "must be a list with at least one message")
    _check_total(fields, messages, "content", MAX_CONTENT_PARTS)
    _check_total(fields, messages, "tool_calls", MAX_TOOL_CALLS)
    read = [_message(fields, f"messages[{index}]", message) for index, message in enumerate(messages)]
    if ignored is not None:
        ignored += fields.unread()
    return read


def read_template_arguments(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`: few, small, and none that the server itself sets."""
    arguments = fields.object("chat_template_kwargs") or {}
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise fields.refuse("chat_template_kwargs", f"may have at most {MAX_TEMPLATE_ARGUMENTS} entries")
    for name in arguments:
        if not _ARGUMENT_NAME.fullmatch(name) or name in RESERVED_TEMPLATE_ARGUMENTS:
            raise fields.refuse("chat_template_kwargs", f"may not set {shown(name)}")
    try:
        size = len(orjson.dumps(arguments))
    except orjson.JSONEncodeError:
        raise fields.refuse("chat_template_kwargs", "is nested too deeply") from None
    if size > MAX_TEMPLATE_ARGUMENT_BYTES:
        raise fields.refuse("chat_template_kwargs", f"may have at most {MAX_TEMPLATE_ARGUMENT_BYTES} bytes")
    return arguments


def _check_total(fields: Fields, messages: Sequence[Any], name: str, most: int) -> None:
    """Bound a list that every message may have, over all of them, before any is read."""
    values = [message.get(name) for message in messages if type(message) is dict]
    total = sum(len(value) for value in values if type(value) is list)
    if total > most:
        raise fields.refuse("messages", f"may hold at most {most} entries of {name} in all, got {total}")


def _message(outer: Fields, path: str, raw: Any) -> dict[str, Any]:
    fields = outer.member(path, raw)
    role = fields.choice("role", ROLES)
    if role is None:
        raise fields.refuse("role", f"is missing; it is one of {', '.join(ROLES)}")
    thoughts: list[str] = []
    message: dict[str, Any] = {"role": role, "content": _content(fields, role, thoughts)}
    for name in ("name", "tool_call_id"):
        value = fields.text(name)
        if value is not None:
            if len(value) > MAX_NAME_LEN:
                raise fields.refuse(name, f"may have at most {MAX_NAME_LEN} characters")
            message[name] = value
    if role == "assistant":
        message |= _assistant_extras(fields, thoughts)
    return message


def _content(fields: Fields, role: str, thoughts: list[str]) -> str | list[dict[str, str]]:
    """Text of a message, or its parts of text. An assistant turn may leave it out; "" is taken everywhere, an empty
    list nowhere. thoughts: gets what an assistant's thinking parts say.
    """
    value = fields.given("content")
    if type(value) is str:
        return value
    if value is None:
        if role == "assistant":
            return ""
        raise fields.refuse("content", f"is missing in a message of role {role}")
    parts = fields.array("content", at_most=MAX_CONTENT_PARTS)
    if not parts:
        raise fields.refuse("content", "must not be an empty list")
    texts: list[str] = []
    for index, part in enumerate(parts):
        is_thought, text = _part(fields, f"content[{index}]", part, role)
        (thoughts if is_thought else texts).append(text)
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""


def _part(outer: Fields, place: str, raw: Any, role: str) -> tuple[bool, str]:
    """(whether it is a thought, its text)."""
    if type(raw) is str:
        return False, raw
    fields = outer.member(place, raw)
    kind = fields.text("type")
    if kind is None:
        raise fields.refuse("type", "is missing")
    if kind == _THOUGHT and role != "assistant":
        raise fields.refuse("type", f"{shown(kind)} is for messages of the assistant")
    if kind not in _TEXT_PARTS:
        raise fields.refuse("type", f"{shown(kind)} is not supported; this model reads text")
    text = fields.text(_TEXT_PARTS[kind])
    if text is None:
        raise fields.refuse(_TEXT_PARTS[kind], "is missing")
    return kind == _THOUGHT, text


def _assistant_extras(fields: Fields, thoughts: list[str]) -> dict[str, Any]:
    if fields.given("audio") is not None:
        raise fields.refuse("audio", "is not supported; this model reads text")
    if fields.given("function_call") is not None:
        raise fields.refuse("function_call", "is not supported; send tool_calls")
    extras: dict[str, Any] = {}
    new, old = fields.text("reasoning"), fields.text("reasoning_content")
    reasoning = new or old or ("\n".join(thoughts) if thoughts else None)
    if reasoning is not None:
        extras |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls = fields.array("tool_calls", at_most=MAX_TOOL_CALLS)
    if calls:
        extras["tool_calls"] = [
            _tool_call(fields, f"tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    return extras


def _tool_call(outer: Fields, place: str, raw: Any) -> dict[str, Any]:
    """An earlier call; templates want its arguments as an object, clients send them as JSON text."""
    fields = outer.member(place, raw)
    function = fields.inner(fields.object("function") or {}, "function")
    name = function.text("name")
    if not name or len(name) > MAX_NAME_LEN:
        raise function.refuse("name", f"must be a string of 1 to {MAX_NAME_LEN} characters")
    fields.choice("type", ("function",))
    fields.integer("index")  # some clients send back a stream's deltas as they were
    return {
        "id": fields.text("id") or "",
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function)},
    }


def _arguments(function: Fields) -> dict[str, Any]:
    value = function.given("arguments")
    if type(value) is str:
        try:
            value = orjson.loads(value) if value.strip() else {}
        except orjson.JSONDecodeError:
            raise function.refuse("arguments", "must be a JSON object as text") from None
    if value is not None and type(value) is not dict:
        raise function.refuse("arguments", "must be a JSON object as text")
    return value or {}
