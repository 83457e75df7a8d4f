"""The events of one sequence as its reader makes them: pieces joined, calls counted, space beside markup left out."""

from __future__ import annotations

from typing import TypeAlias

from oneloop.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_SPACE = " \t\r\n"
_TextKind: TypeAlias = "type[Content | Reasoning | ToolCallArguments]"


class Output:
    """Collects events. White space around thinking, in front of calls and between them is markup, and no text.

    White space is therefore held back until it is known what follows. At the end of a sequence it is text, unless it
    stands behind a call.
    """

    __slots__ = (
        "_at_border", "_events", "_follows_call", "_has_content", "_is_reasoning", "_kind", "_parts", "_spaces",
        "num_calls", "spans",
    )  # fmt: skip

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: _TextKind = Content
        self._parts: list[str] = []
        """Of the text event that is not closed yet, which is of `_kind`."""
        self._spaces: list[str] = []
        self._at_border = False
        self._follows_call = False
        self._has_content = False
        self._is_reasoning = False
        self.num_calls = 0
        """Calls that have begun."""
        self.spans: list[list[int]] = []
        """Where in the raw text thinking was: [first byte, byte behind it], without the latter while it is open."""

    def content(self, text: str) -> None:
        """Text of the answer."""
        self._add(text)

    def reasoning(self, text: str) -> None:
        """Text of the thinking, between `begin_reasoning` and `end_reasoning`."""
        self._add(text)

    def begin_reasoning(self, offset: int) -> None:
        """The thinking begins. offset: bytes of the raw text before it."""
        self._border()
        self._is_reasoning = True
        self.spans.append([offset])

    def end_reasoning(self, offset: int) -> None:
        """The thinking is over."""
        self._border()
        self._is_reasoning = False
        self.spans[-1].append(offset)

    def separate(self) -> None:
        """A text begins that is no going on of the one before: a line between them, where there was one."""
        self._spaces.clear()
        if self._has_content:
            self._at_border = False
            self._spaces.append("\n")
        else:
            self._at_border = True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self._border()
        self._events.append(ToolCallStart(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the open call's arguments."""
        if text:
            self._at_border = False
            self._append(ToolCallArguments, text)

    def end_call(self) -> None:
        """The open call is complete."""
        self._close_text()
        self._events.append(ToolCallEnd(self.num_calls - 1))
        self._at_border = False
        self._follows_call = True

    def take(self) -> list[Event]:
        """The events since the last look."""
        self._close_text()
        events, self._events = self._events, []
        return events

    def flush(self) -> None:
        """The sequence has ended: what was held back is text, unless it stands behind a call."""
        spaces, self._spaces = self._spaces, []
        if spaces and not self._follows_call:
            self._emit("".join(spaces))

    @property
    def holds_nothing(self) -> bool:
        """Whether content goes through as it comes."""
        return not (self._spaces or self._at_border or self._is_reasoning)

    def _add(self, text: str) -> None:
        if self._at_border:
            text = text.lstrip(_SPACE)
            if not text:
                return
            self._at_border = False
        body = text.rstrip(_SPACE)
        if not body:
            self._spaces.append(text)
            return
        if self._spaces:
            head = "".join(self._spaces)
            self._spaces.clear()
            self._emit(head + body)
        else:
            self._emit(body)
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _emit(self, text: str) -> None:
        self._follows_call = False
        if not self._is_reasoning:
            self._has_content = True
        self._append(Reasoning if self._is_reasoning else Content, text)

    def _append(self, kind: _TextKind, text: str) -> None:
        if kind is not self._kind:
            self._close_text()
            self._kind = kind
        self._parts.append(text)

    def _close_text(self) -> None:
        """Make the event of the pieces that belong together."""
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))
        else:
            self._events.append(Reasoning(text) if self._kind is Reasoning else Content(text))

    def _border(self) -> None:
        self._close_text()
        self._spaces.clear()
        self._at_border = True
