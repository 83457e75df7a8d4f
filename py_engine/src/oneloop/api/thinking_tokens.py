"""Which tokens of a reply are thinking: what ends it, and how many there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.tokenize.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EndState:
    """What `EndToken` knows of the tokens so far."""

    has_come: bool = False
    num_marks: int = 0
    """Of the text up to the token, with its own."""
    tail: bytes = b""
    """The end of their text, in which a mark may have begun."""


class EndToken:
    """Tells the token that ends the thinking from other tokens with the same text.

    A grammar holds from that token on, and so must the answer begin there. Text comes with its tokens or after them.
    """

    __slots__ = ("_has_come", "_mark", "_num_asked", "_num_marks", "_tail", "_token", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, token: int, state: EndState | None = None) -> None:
        self._tokenizer = tokenizer
        self._token = token
        self._mark = tokenizer.token_bytes(token)
        state = state or EndState()
        self._has_come = state.has_come
        self._num_marks = state.num_marks
        self._tail = state.tail
        self._num_asked = 0

    @property
    def state(self) -> EndState:
        """To go on from, with all of the text again."""
        return EndState(self._has_come, self._num_marks, self._tail)

    def add(self, token_ids: Sequence[int]) -> None:
        """More tokens have come."""
        for token in token_ids:
            if self._has_come:
                return
            if token == self._token:
                self._has_come = True
                self._num_marks += 1
            elif token < self._tokenizer.vocab_size:
                data = self._tail + self._tokenizer.token_bytes(token)
                self._num_marks += data.count(self._mark)
                self._tail = data[1 - len(self._mark) :]

    def is_end(self) -> bool:
        """Whether the next mark in the text is the token."""
        self._num_asked += 1
        return self._has_come and self._num_asked == self._num_marks


class ThinkingTokens:
    """Counts tokens whose text begins in the thinking, marks included, whatever pieces the text came in.

    The places are bytes of the text; where a token's bytes are no text (U+FFFD stands for them), they are off by a
    few.
    """

    __slots__ = ("_hidden", "_offset", "_pending", "_span", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        """hidden: tokens that leave no text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._offset = 0
        self._pending: deque[tuple[int, int]] = deque()
        """First byte and byte behind of tokens that are not decided."""
        self._span = 0

    def add(self, token_ids: Sequence[int], spans: Sequence[Sequence[int]], decided: int | None) -> int:
        """How many more tokens are found to be thinking.

        spans: as StreamParser.reasoning_spans. decided: bytes of text that the parser has read; None: all.
        """
        for token in token_ids:
            start = self._offset
            if token not in self._hidden and token < self._tokenizer.vocab_size:
                self._offset += len(self._tokenizer.token_bytes(token))
            self._pending.append((start, self._offset))
        found, pending = 0, self._pending
        while pending and (decided is None or pending[0][1] <= decided):
            found += self._is_thinking(pending.popleft()[0], spans)
        return found

    def _is_thinking(self, start: int, spans: Sequence[Sequence[int]]) -> bool:
        while self._span < len(spans):
            first, *end = spans[self._span]
            if end and start >= end[0]:
                self._span += 1
                continue
            return start >= first
        return False
