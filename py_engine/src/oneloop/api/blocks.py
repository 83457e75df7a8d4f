"""A reply's blocks: what a parser's events open, add to and close, one after the other.

Responses and Anthropic both tell a reply as a list of blocks, each complete before the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from oneloop.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from oneloop.engine.outputs import FinishReason
    from oneloop.parsers.events import Event


@dataclass(slots=True)
class Block:
    """One of them, as far as it has come."""

    index: int
    """0, 1, … in the order of the reply."""
    kind: Literal["text", "thinking", "call"]
    name: str = ""
    """Of the function."""
    call_id: str = ""
    """Of the call."""
    parts: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Once it is closed: whether nothing of it is missing."""

    @property
    def text(self) -> str:
        """All of its text: of a call the arguments, as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """Text was added to the block that is open."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete."""

    block: Block


BlockEvent: TypeAlias = Opened | Grown | Closed


class BlockTracker:
    """Cuts a sequence's events into blocks, alike however the text was cut before.

    White space between blocks makes none: it is held back until text follows. A reply of nothing else keeps it.
    """

    __slots__ = ("_blank", "_call_id", "_open", "blocks")

    def __init__(self, call_id: Callable[[ToolCallStart], str]) -> None:
        """call_id: makes the id of a call."""
        self._call_id = call_id
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._blank: Content | Reasoning | None = None

    @property
    def open_block(self) -> Block | None:
        """The one that text is being added to."""
        return self._open

    @property
    def has_calls(self) -> bool:
        """Whether one of the blocks is a call that is whole: others are not to be made."""
        return any(block.kind == "call" and block.is_whole for block in self.blocks)

    def add(self, events: Iterable[Event]) -> list[BlockEvent]:
        """What the events do to the blocks."""
        out: list[BlockEvent] = []
        for event in events:
            match event:
                case Content() | Reasoning():
                    self._text(event, out)
                case ToolCallStart():
                    block = Block(len(self.blocks), "call", event.name, self._call_id(event))
                    self._begin(block, out)
                case ToolCallArguments(_, text):
                    self._grow(text, out)
                case ToolCallEnd():
                    self._close(out, is_whole=True)
        return out

    def finish(self, reason: FinishReason) -> list[BlockEvent]:
        """The sequence has ended, and with it the block that is open. reason: why; texts are whole with "stop"."""
        out: list[BlockEvent] = []
        if not self.blocks and isinstance(self._blank, Content):
            blank, self._blank = self._blank, None
            self._begin(Block(0, "text"), out)
            self._grow(blank.text, out)
        self._close(out, is_whole=reason == "stop" and self._is_text_open)
        return out

    @property
    def _is_text_open(self) -> bool:
        return self._open is not None and self._open.kind != "call"

    def _close(self, out: list[BlockEvent], *, is_whole: bool) -> None:
        if self._open is not None:
            self._open.is_whole = is_whole
            out.append(Closed(self._open))
            self._open = None

    def _text(self, event: Content | Reasoning, out: list[BlockEvent]) -> None:
        kind: Literal["text", "thinking"] = "text" if isinstance(event, Content) else "thinking"
        text = event.text
        if self._open is None or self._open.kind != kind:
            self._close(out, is_whole=self._is_text_open)
            if type(self._blank) is type(event):
                text = self._blank.text + text
            if not text.strip():
                self._blank = type(event)(text)
                return
            self._begin(Block(len(self.blocks), kind), out)
        self._grow(text, out)

    def _begin(self, block: Block, out: list[BlockEvent]) -> None:
        self._close(out, is_whole=self._is_text_open)
        self._blank = None
        self.blocks.append(block)
        self._open = block
        out.append(Opened(block))

    def _grow(self, text: str, out: list[BlockEvent]) -> None:
        if self._open is not None:
            self._open.parts.append(text)
            out.append(Grown(self._open, text))
