"""A conversation in the making: the messages that templates read, from the pieces that other APIs send.

Responses and Anthropic send thinking, text, calls and results as pieces of their own; a template's assistant turn has
them together.
"""

from __future__ import annotations

from typing import Any


class Turns:
    """Adds pieces in the order they were said. `messages` are as `protocol.messages.read_messages` makes them."""

    __slots__ = ("_names", "_open", "messages")

    def __init__(self, messages: list[dict[str, Any]] | None = None) -> None:
        """messages: what was said before."""
        self.messages = messages or []
        self._names = {
            call["id"]: call["function"]["name"]
            for message in self.messages
            for call in message.get("tool_calls", ())
        }
        self._open: dict[str, Any] | None = None
        """The assistant's turn that may go on."""

    def say(self, role: str, text: str) -> None:
        """A message of anybody but the assistant."""
        self._open = None
        self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """The assistant thinks: before what it says and calls, so a turn that has come that far is over."""
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            self._open = None
            turn = self._turn()
        thought = turn.get("reasoning", "") + text
        turn["reasoning"] = turn["reasoning_content"] = thought

    def answer(self, text: str) -> None:
        """The assistant says something: before what it calls."""
        turn = self._turn()
        if "tool_calls" in turn:
            self._open = None
            turn = self._turn()
        turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """The assistant calls a function."""
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a call gave. Some templates want the function's name, which the calls before it have told."""
        self._open = None
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _turn(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        return self._open
