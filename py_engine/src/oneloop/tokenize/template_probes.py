"""What a chat template reads, found out by rendering marked messages: templates do not say it, and fail or drop text
where they are given something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oneloop.errors import RequestError

ContentFormat = Literal["string", "list", "both"]
"""What a template reads as a message's content: text, a list of typed parts, or either."""

Print = Callable[[Mapping[str, Any]], str]
"""Renders the template with these variables. Raises RequestError where it refuses."""

_TEXTS = ("oneloopProbeOne", "oneloopProbeTwo")
_KEY, _VALUE = "oneloopProbeKey", "oneloopProbeValue"
_CALL_ID = "probe0001"
"""Nine letters and digits, which some templates ask for."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template reads an assistant's calls."""

    arguments_are_text: bool = False
    """It writes the arguments as they come, so they must be JSON text; else an object."""
    content_is_null: bool = False
    """It shows calls only where the content beside them is none."""


def content_format(show: Print) -> ContentFormat:
    """Whether text, a list of two text parts, or both appear in the prompt."""
    parts = [{"type": "text", "text": text} for text in _TEXTS]
    if not _shows(show, parts):
        return "string"
    return "both" if _shows(show, "".join(_TEXTS)) else "list"


def call_form(show: Print, *, parts: bool) -> CallForm:
    """The first form in which a call's arguments appear whole: an object before text, "" before none.

    parts: whether contents are lists. A template that shows no calls at all gets the usual form.
    """
    for content_is_null in (False, True):
        for arguments_are_text in (False, True):
            if _shows_call(show, arguments_are_text, content_is_null, parts=parts):
                return CallForm(arguments_are_text, content_is_null)
    return CallForm()


def names_role(source: str, role: str) -> bool:
    """Whether a template has something to say about a role of that name."""
    return f"'{role}'" in source or f'"{role}"' in source


def _shows(show: Print, content: str | list[dict[str, str]]) -> bool:
    try:
        prompt = show({"messages": [{"role": "user", "content": content}]})
    except RequestError:
        return False
    # a list printed whole shows its quoted keys
    return all(text in prompt for text in _TEXTS) and "'text'" not in prompt


def _shows_call(show: Print, arguments_are_text: bool, content_is_null: bool, *, parts: bool) -> bool:
    def text(value: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": value}] if parts else value

    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if arguments_are_text else {_KEY: _VALUE}
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    content = None if content_is_null else text("")
    messages = [
        {"role": "user", "content": text("x")},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": text("y"), "name": "probe", "tool_call_id": _CALL_ID},
    ]
    try:
        prompt = show({"messages": messages})
    except RequestError:
        return False
    if content_is_null and "None" in prompt:
        return False
    # neither as Python prints an object, nor as a JSON text within a JSON text
    return _KEY in prompt and _VALUE in prompt and f"'{_KEY}'" not in prompt and f'\\"{_KEY}' not in prompt
