"""Text of generated tokens outside of the engine: whole, or piece by piece with a state that fits into JSON.

What is shown is what the engine's own replies show: stop strings and the token that ended the text are left out, text
that may yet become a stop string waits, special tokens are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oneloop_core import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop_core import Vocabulary

MAX_TAIL = 8192
"""Tokens whose text may wait: a stop string has at most 1,024 bytes, but tokens may have none."""
_PIECE = 64
"""Tokens after which it is looked whether text waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """What of the tokens is text. Fields as SamplingParams has them."""

    skip_special_tokens: bool = True
    shown_special_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0

    def decoder(self, vocabulary: Vocabulary, num_tokens: int) -> StreamDecoder:
        """At a place where no text waits. num_tokens: how many were before."""
        return StreamDecoder(
            vocabulary,
            skip_special_tokens=self.skip_special_tokens,
            shown_special_ids=self.shown_special_ids,
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=max(self.min_tokens - num_tokens, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a sequence ended."""

    by_token: bool
    """Its last token ended it, and is no part of the text unless stop strings are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """Where a text stands between two pieces."""

    num_tokens: int = 0
    """Before the tail."""
    tail: list[int] = field(default_factory=list)
    """Tokens since a place where no text waited; none where none waits now."""
    num_shown: int = 0
    """Characters of the tail's text that were given out."""
    num_chars: int = 0
    """Characters of the text before the tail."""


def next_text(
    vocabulary: Vocabulary, form: TextForm, state: TextState, token_ids: Sequence[int], ended: Ended | None
) -> tuple[str, TextState]:
    """The text that is certain with these tokens, and the state behind it. ended: nothing follows.

    IndexError for an id out of range. Costs what the tail and the tokens do, whatever was before.
    """
    if ended is not None:
        return _last_text(vocabulary, form, state, token_ids, ended)
    parts: list[str] = []
    start, size = 0, _PIECE
    while start < len(token_ids):
        piece = token_ids[start : start + size]
        text, state = _more_text(vocabulary, form, state, piece)
        parts.append(text)
        start += len(piece)
        # Where text waits, a place where none does is near: within a character, or a stop string at most.
        size = _PIECE if not state.tail else 1 if size == _PIECE else min(2 * size, _PIECE)
    return "".join(parts), state


def _last_text(
    vocabulary: Vocabulary, form: TextForm, state: TextState, token_ids: Sequence[int], ended: Ended
) -> tuple[str, TextState]:
    decoder = form.decoder(vocabulary, state.num_tokens)
    hides_last = ended.by_token and not form.include_stop_str_in_output
    shown = token_ids[:-1] if hides_last else token_ids
    parts = [decoder.push(token) for token in (*state.tail, *shown)]
    parts.append(decoder.flush())
    text = "".join(parts)
    num_tokens = state.num_tokens + len(state.tail) + len(token_ids)
    return text[state.num_shown :], TextState(num_tokens=num_tokens, num_chars=state.num_chars + len(text))


def _more_text(
    vocabulary: Vocabulary, form: TextForm, state: TextState, token_ids: Sequence[int]
) -> tuple[str, TextState]:
    decoder = form.decoder(vocabulary, state.num_tokens)
    tail = [*state.tail, *token_ids]
    text = "".join([decoder.push(token) for token in tail])
    added = text[state.num_shown :]
    if _waits(vocabulary, form, state, tail, decoder):
        return added, replace(state, tail=tail, num_shown=len(text))
    num_tokens = state.num_tokens + len(tail)
    return added, TextState(num_tokens=num_tokens, num_chars=state.num_chars + len(text))


def _waits(
    vocabulary: Vocabulary, form: TextForm, state: TextState, tail: Sequence[int], decoder: StreamDecoder
) -> bool:
    """Whether a character or a stop string may be under way. decoder: has read the tail, and is used up by this."""
    if form.stop and form.include_stop_str_in_output:
        # It holds nothing back that becomes a stop string; one that leaves them out does.
        decoder = replace(form, include_stop_str_in_output=False).decoder(vocabulary, state.num_tokens)
        for token in tail:
            decoder.push(token)
    return decoder.matched is not None or bool(decoder.flush())


def whole_text(vocabulary: Vocabulary, form: TextForm, token_ids: Sequence[int], ended: Ended) -> str:
    """The text of all tokens of a sequence. IndexError for an id out of range."""
    return next_text(vocabulary, form, TextState(), token_ids, ended)[0]
