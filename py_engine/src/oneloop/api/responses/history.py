"""Items of the Responses API, sent or generated → the conversation that templates read."""

from __future__ import annotations

from typing import Any

import orjson

from oneloop.api.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_NAME_LEN
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.turns import Turns

_ROLES = ("user", "assistant", "system", "developer")
_OF_REPLIES = ("id", "status", "annotations", "logprobs")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read_input(fields: Fields, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`input`, a text or items, behind what was said before. ApiError (400) naming the item."""
    value = fields.given("input")
    turns = Turns(before)
    if type(value) is str:
        turns.say("user", value)
        return turns.messages
    items = fields.array("input", at_most=MAX_MESSAGES)
    if not items and not before:
        raise fields.refuse("input", "must be a text or a list with at least one item")
    parts = [item.get("content") for item in items or () if type(item) is dict]
    num_parts = sum(len(part) for part in parts if type(part) is list)
    if num_parts > MAX_CONTENT_PARTS:
        raise fields.refuse("input", f"may hold at most {MAX_CONTENT_PARTS} parts in all, got {num_parts}")
    for index, item in enumerate(items or ()):
        _item(fields, f"input[{index}]", item, turns)
    if len(turns.messages) > MAX_MESSAGES:
        raise fields.refuse("input", f"is the end of a conversation of more than {MAX_MESSAGES} messages")
    return turns.messages


def add_output(messages: list[dict[str, Any]], output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with a reply's items behind it."""
    turns = Turns(messages)
    for index, item in enumerate(output):
        match item["type"]:
            case "message":
                turns.answer("".join(part["text"] for part in item["content"]))
            case "reasoning":
                turns.think("".join(part["text"] for part in item["content"]))
            case "function_call":
                turns.call(item["call_id"], item["name"], _generated_arguments(item["arguments"]))
            case kind:
                raise AssertionError(f"item {index} of a reply is a {kind}")
    return turns.messages


def _generated_arguments(text: str) -> dict[str, Any]:
    """Of a call that the model wrote; what is no JSON object (it was cut) has nothing that a template could show."""
    try:
        value = orjson.loads(text)
        orjson.dumps(value)  # it is stored
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {}
    return value if type(value) is dict else {}


def _item(outer: Fields, place: str, raw: Any, turns: Turns) -> None:
    if type(raw) is str:
        turns.say("user", raw)
        return
    fields = _piece(outer, place, raw)
    match fields.text("type") or "message":
        case "message":
            _message(fields, turns)
        case "reasoning":
            _reasoning(fields, turns)
        case "function_call":
            turns.call(_name(fields, "call_id"), _name(fields, "name"), _arguments(fields))
        case "function_call_output":
            turns.result(_name(fields, "call_id"), _content(fields, "output"))
        case kind:
            known = "message, reasoning, function_call and function_call_output"
            raise fields.refuse("type", f"{shown(kind)} is not supported; this server reads {known}")


def _message(fields: Fields, turns: Turns) -> None:
    role = fields.choice("role", _ROLES)
    if role is None:
        raise fields.refuse("role", f"is missing; it is one of {', '.join(sorted(_ROLES))}")
    text = _content(fields, "content")
    if role == "assistant":
        turns.answer(text)
    else:
        turns.say(role, text)


def _reasoning(fields: Fields, turns: Turns) -> None:
    """Its text; of one that came without, the summary."""
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = fields.array(key, at_most=MAX_CONTENT_PARTS) or []
        texts = []
        for index, raw in enumerate(parts):
            part = _piece(fields, f"{key}[{index}]", raw)
            part.choice("type", (kind,))
            texts.append(part.text("text") or "")
        if any(texts):
            turns.think("\n".join(texts))
            return


def _content(fields: Fields, key: str) -> str:
    """A text, or parts that are texts."""
    value = fields.given(key)
    if type(value) is str:
        return value
    if value is None:
        raise fields.refuse(key, "is missing")
    parts = fields.array(key, at_most=MAX_CONTENT_PARTS) or []
    return "\n".join(_part(fields, f"{key}[{index}]", part) for index, part in enumerate(parts))


def _part(outer: Fields, place: str, raw: Any) -> str:
    fields = _piece(outer, place, raw)
    kind = fields.text("type")
    if kind is None:
        raise fields.refuse("type", "is missing")
    if kind not in _TEXTS:
        raise fields.refuse("type", f"{shown(kind)} is not supported; this model reads text")
    text = fields.text(_TEXTS[kind])
    if text is None:
        raise fields.refuse(_TEXTS[kind], "is missing")
    return text


def _arguments(fields: Fields) -> dict[str, Any]:
    """Of an earlier call: templates want an object, clients send it as JSON text."""
    text = fields.text("arguments") or ""
    try:
        value = orjson.loads(text) if text.strip() else {}
        orjson.dumps(value)  # what is stored is written again
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        raise fields.refuse("arguments", "must be a JSON object as text") from None
    if type(value) is not dict:
        raise fields.refuse("arguments", "must be a JSON object as text")
    return value


def _name(fields: Fields, key: str) -> str:
    value = fields.text(key)
    if not value or len(value) > MAX_NAME_LEN:
        raise fields.refuse(key, f"must be a string of 1 to {MAX_NAME_LEN} characters")
    return value


def _piece(outer: Fields, place: str, raw: Any) -> Fields:
    """An item or a part of one. What replies have beside the texts may come back with them."""
    fields = outer.member(place, raw)
    for name in _OF_REPLIES:
        fields.given(name)
    return fields
