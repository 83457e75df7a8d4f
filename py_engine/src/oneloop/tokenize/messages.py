"""Chat messages as templates want them: contents are text or text parts, tool arguments are objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.errors import RequestError
from oneloop.tokenize.conversation import Conversation, Message, Tool, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who may speak. Templates drop other roles, or print them for the model to puzzle over."""
_REASONING_NAMES = ("thinking", "reasoning", "reasoning_content")
"""Names under which clients send back a message's reasoning; templates read the first or the second."""


def read_conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> Conversation:
    """A conversation from plain dictionaries, as Python callers write them. RequestError names what is malformed."""
    return Conversation(
        messages=tuple(_message(message) for message in prepare_messages(messages)),
        tools=tuple(_tool(index, tool) for index, tool in enumerate(tools or ())),
        documents=tuple(documents or ()),
    )


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates read it: a copy, which whoever gets it may change. What is not there is left out."""
    content = message.content
    shown: dict[str, Any] = {"role": message.role}
    if message.reasoning is not None:
        shown |= dict.fromkeys(_REASONING_NAMES, message.reasoning)
    shown["content"] = content if isinstance(content, str) else _as_parts(content)
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def parse_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments, which the wire carries as the text of a JSON object. The text itself where it is none."""
    try:
        parsed = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


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
    reasoning = next((prepared[name] for name in reversed(_REASONING_NAMES) if name in prepared), None)
    if reasoning is not None:
        prepared |= dict.fromkeys(_REASONING_NAMES, reasoning)
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
    # a model's own malformed call is shown as it was
    return {**call, "function": {**function, "arguments": parse_arguments(arguments)}}


def _message(prepared: Mapping[str, Any]) -> Message:
    """prepared: of prepare_messages()."""
    content = prepared["content"]
    calls = prepared.get("tool_calls") or ()
    reasoning = prepared.get("reasoning_content")
    return Message(
        role=prepared["role"],
        content=content if isinstance(content, str) else tuple(part["text"] for part in content),
        name=_text(prepared, "name"),
        reasoning=None if reasoning is None else str(reasoning),
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=_text(prepared, "tool_call_id"),
    )


def _text(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError("messages", f"a message's {name} must be a string")
    return value


def _call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping | str | None):
        raise RequestError("messages", "a tool call needs a function with a name and arguments (an object)")
    return ToolCall(name=name, arguments={} if arguments is None else arguments, id=_text(call, "id"))


def _tool(index: int, tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError("tools", f"tool {index} needs a function with a name")
    return Tool(
        name=name,
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict"),
    )


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}


def _as_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


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
