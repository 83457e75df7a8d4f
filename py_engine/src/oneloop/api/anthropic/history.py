"""Anthropic's messages, made of blocks → the conversation that templates read."""

from __future__ import annotations

import re
from typing import Any

from oneloop.api.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_NAME_LEN
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.turns import Turns

_ROLES = ("user", "assistant", "system")
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
"""What Claude Code puts into the system prompt: it changes with every request, and with it all that follows it would
miss the prefix cache."""


def read_system(fields: Fields, *, keep_billing_line: bool) -> str:
    """`system`: a text, or text blocks. "" for none.

    keep_billing_line: whether a line with Claude Code's billing header stays in it.
    """
    value = fields.given("system")
    if value is None or type(value) is str:
        texts = [value or ""]
    else:
        blocks = fields.array("system", at_most=MAX_CONTENT_PARTS) or []
        texts = [_text_of(fields, f"system[{index}]", block) for index, block in enumerate(blocks)]
    if not keep_billing_line:
        texts = [_BILLING_LINE.sub("", text) for text in texts]
    return "\n".join(text for text in texts if text)


def read_history(fields: Fields, system: str) -> list[dict[str, Any]]:
    """`messages` behind the system prompt. ApiError (400) naming the block."""
    messages = fields.array("messages", at_most=MAX_MESSAGES)
    if not messages:
        raise fields.refuse("messages", "must be a list with at least one message")
    contents = [message.get("content") for message in messages if type(message) is dict]
    num_blocks = sum(len(content) for content in contents if type(content) is list)
    if num_blocks > MAX_CONTENT_PARTS:
        raise fields.refuse(
            "messages", f"may hold at most {MAX_CONTENT_PARTS} blocks in all, got {num_blocks}"
        )
    turns = Turns()
    if system:
        turns.say("system", system)
    for index, message in enumerate(messages):
        _message(fields.member(f"messages[{index}]", message), turns)
    return turns.messages


def _message(fields: Fields, turns: Turns) -> None:
    role = fields.choice("role", _ROLES)
    if role is None:
        raise fields.refuse("role", f"is missing; it is one of {', '.join(_ROLES)}")
    content = fields.given("content")
    if type(content) is str:
        if role == "assistant":
            turns.answer(content)
        else:
            turns.say(role, content)
        return
    blocks = fields.array("content", at_most=MAX_CONTENT_PARTS)
    if not blocks:
        raise fields.refuse("content", "must be a text or a list with at least one block")
    if role == "assistant":
        for index, block in enumerate(blocks):
            _assistant_block(_block(fields, f"content[{index}]", block), turns)
    else:
        _other_blocks(fields, role, blocks, turns)


def _other_blocks(outer: Fields, role: str, blocks: list[Any], turns: Turns) -> None:
    """Results of calls are messages of their own; the texts between them are one each."""
    texts: list[str] = []

    def say() -> None:
        if texts:
            turns.say(role, "\n".join(texts))
            texts.clear()

    for index, raw in enumerate(blocks):
        fields = _block(outer, f"content[{index}]", raw)
        if role == "user" and fields.text("type") == "tool_result":
            say()
            turns.result(_call_id(fields, "tool_use_id"), _result(fields))
        else:
            texts.append(_text_in(fields))
    say()


def _assistant_block(fields: Fields, turns: Turns) -> None:
    match fields.text("type"):
        case "text":
            turns.answer(_required_text(fields, "text"))
        case "thinking":
            turns.think(_required_text(fields, "thinking"))
            fields.given("signature")
        case "redacted_thinking":
            fields.given("data")  # written for another server, which alone can read it
        case "tool_use":
            name = _required_text(fields, "name")
            if not name or len(name) > MAX_NAME_LEN:
                raise fields.refuse("name", f"must be a string of 1 to {MAX_NAME_LEN} characters")
            turns.call(_call_id(fields, "id"), name, fields.shallow_object("input") or {})
        case kind:
            raise _not_supported(fields, kind, "text, thinking and tool_use")


def _result(fields: Fields) -> str:
    """What a tool gave."""
    failed = fields.flag("is_error", False)
    content = fields.given("content")
    if type(content) is str:
        text = content
    else:
        blocks = fields.array("content", at_most=MAX_CONTENT_PARTS) or []
        text = "\n".join(_text_of(fields, f"content[{index}]", block) for index, block in enumerate(blocks))
    return text or ("The tool failed." if failed else "")


def _text_of(outer: Fields, place: str, raw: Any) -> str:
    return _text_in(_block(outer, place, raw))


def _text_in(fields: Fields) -> str:
    """Text of a block: of a text, or of a document that is one."""
    kind = fields.text("type")
    if kind == "text":
        fields.given("citations")  # of an earlier reply
        return _required_text(fields, "text")
    if kind == "document":
        source = fields.inner(fields.object("source") or {}, "source")
        if source.text("type") == "text":
            source.given("media_type")
            return _required_text(source, "data")
    raise _not_supported(fields, kind, "text")


def _block(outer: Fields, place: str, raw: Any) -> Fields:
    fields = outer.member(place, raw)
    fields.given("cache_control")  # prefixes are cached without it
    return fields


def _required_text(fields: Fields, key: str) -> str:
    value = fields.text(key)
    if value is None:
        raise fields.refuse(key, "is missing")
    return value


def _call_id(fields: Fields, key: str) -> str:
    value = fields.text(key)
    if not value or len(value) > MAX_NAME_LEN:
        raise fields.refuse(key, f"must be a string of 1 to {MAX_NAME_LEN} characters")
    return value


def _not_supported(fields: Fields, kind: str | None, supported: str) -> Exception:
    if kind is None:
        return fields.refuse("type", "is missing")
    return fields.refuse("type", f"{shown(kind)} is not supported here; this model reads {supported}")
