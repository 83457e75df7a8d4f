"""The events of the streaming parsers: what chat, Responses and Anthropic replies are made of, streamed or whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thinking before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. index: 0, 1, … in the order of the calls. id: where the format writes one itself."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces of a call together are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is complete; nothing of it follows."""

    index: int


Event: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


class OutputParser(Protocol):
    """Takes one sequence's text apart. However a text is cut, all events of a kind joined are the same."""

    def push(self, text: str) -> list[Event]:
        """What is certain with this text. No text of an event is empty."""

    def finish(self) -> list[Event]:
        """What was held back: the sequence has ended."""
