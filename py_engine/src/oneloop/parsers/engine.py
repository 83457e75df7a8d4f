"""The parser of one sequence: a reasoning format, a tool format, or both, over one scanner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.parsers.output import Output
from oneloop.parsers.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.parsers.events import Event
    from oneloop.parsers.formats import ReasoningFormat, ToolFormat, Tools
    from oneloop.parsers.scanner import Steps

PROMPT_END_CHARS = 64
"""So much of a prompt's end says whether it has opened the thinking."""


class StreamParser:
    """Takes one sequence's text apart (an `OutputParser`). However the text is cut, what comes out is the same."""

    __slots__ = ("_out", "_scanner", "_steps")

    def __init__(
        self, read: Callable[[Scanner], Steps[None]], is_end: Callable[[], bool] | None = None
    ) -> None:
        """read: takes all of the text. Once it returns, what follows is content. is_end: as Scanner.is_end."""
        self._out = Output()
        self._scanner = Scanner(self._out, is_end)
        self._steps: Steps[None] | None = read(self._scanner)

    def push(self, text: str) -> list[Event]:
        """What is certain with this text."""
        if self._steps is None:
            if text:
                self._out.content(text)
            return self._out.take()
        self._scanner.feed(text)
        self._resume()
        return self._out.take()

    def finish(self) -> list[Event]:
        """What was held back: the sequence has ended."""
        self._scanner.ended = True
        self._resume()
        self._out.flush()
        return self._out.take()

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is content as it stands."""
        return self._steps is None and self._out.holds_nothing

    @property
    def offset(self) -> int:
        """Bytes of the text that were read: what they are is certain. Not counted once everything is plain."""
        return self._scanner.offset()

    @property
    def reasoning_spans(self) -> list[list[int]]:
        """Where in the raw text thinking was, marks included: first byte and byte behind it, lacking if open."""
        return self._out.spans

    def _resume(self) -> None:
        if self._steps is None:
            return
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            scanner = self._scanner
            if scanner.at < len(scanner.text):
                self._out.content(scanner.take(len(scanner.text)))


def make_parser(
    reasoning: ReasoningFormat | None,
    calls: ToolFormat | None,
    tools: Tools,
    *,
    prompt_end: str = "",
    is_thinking_on: bool | None = None,
    is_end: Callable[[], bool] | None = None,
) -> StreamParser:
    """The parser of one sequence.

    calls: None where no calls are wanted. tools: the request's functions. prompt_end: the last characters of the prompt
    (PROMPT_END_CHARS are enough). is_thinking_on: what the client said, None for nothing.
    is_end: as Scanner.is_end, for formats that have no other way to end it than one mark.
    """
    if reasoning is None:
        return StreamParser(lambda scanner: _read(scanner, None, calls, tools, False))
    if reasoning.read_all is not None:
        read_all = reasoning.read_all
        return StreamParser(lambda scanner: read_all(scanner, tools))
    thinking = None if reasoning.is_over(prompt_end) else reasoning
    is_open = reasoning.is_open(prompt_end, is_thinking_on)
    return StreamParser(lambda scanner: _read(scanner, thinking, calls, tools, is_open), is_end)


def _read(
    scanner: Scanner, reasoning: ReasoningFormat | None, calls: ToolFormat | None, tools: Tools, is_open: bool
) -> Steps[None]:
    if reasoning is not None:
        yield from reasoning.read(scanner, is_open)
    if calls is not None:
        yield from calls.read(scanner, tools)
