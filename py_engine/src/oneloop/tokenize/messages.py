"""Chat messages as templates want them: contents are text or text parts, tool arguments are objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who may speak. Templates drop other roles, or print them for the model to puzzle over."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send back a message's reasoning; templates read the first or the second."""


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies in which content is a str or a list of text parts (None becomes ""), and no other value is None.

    RequestError("messages", …) names the message that is malformed.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    return [_prepare(i, message) for i, message in enumerate(messages)]


def _prepare(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"message {index} is not an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError("messages", f"message {index} has no role")
    if role not in ROLES:
        raise RequestError(
            "messages", f"message {index} has the role {role[:40]!r}; it is one of {', '.join(ROLES)}"
        )
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = _content(index, message.get("content"))
    if isinstance(prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_parse_arguments(call) for call in prepared["tool_calls"]]
    reasoning = next((prepared[name] for name in _REASONING_NAMES if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _content(index: int, content: Any) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            "messages", f"message {index}: content must be text, a list of text parts, or null"
        )
    parts: list[dict[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError("messages", f"message {index}: only text content is supported")
        parts.append({"type": "text", "text": text})
    return parts


def _parse_arguments(call: Any) -> Any:
    """The wire carries a tool call's arguments as JSON text; templates print them as an object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call  # a model's own malformed call is shown as it was
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def flatten_content(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined by newlines, for templates that read plain strings."""
    if isinstance(message["content"], list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    return message


def wrap_content(message: dict[str, Any]) -> dict[str, Any]:
    """Text as a list of one part, for templates that read nothing else."""
    if isinstance(message["content"], str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message
