"""Log-probabilities in the two wire forms, straight to JSON: what a token always looks like is encoded once.

A reply may hold millions of entries (n x tokens x alternatives), and encoding runs on the event loop: an entry costs
two table look-ups and a number, and whole replies give way after every `AT_ONCE` tokens.
Token texts come from the vocabulary's bytes, never from decoded text.
"""

from __future__ import annotations

import asyncio
import codecs
from typing import TYPE_CHECKING, Protocol

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.outputs import TokenLogprobs
    from oneloop.tokenize.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no -Infinity."""
AT_ONCE = 256
"""Tokens of a whole reply that are encoded before others get a turn: about 5 ms with 20 alternatives each."""


class TokenTexts:
    """Text and bytes of single tokens, and their JSON, which is kept: at most one entry per row of the vocabulary."""

    __slots__ = ("_entries", "_names", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, bytes] = {}
        self._entries: dict[int, tuple[bytes, bytes]] = {}

    def data(self, token_id: int) -> bytes:
        """The token's bytes. A model's rows beyond the vocabulary (padding) have none."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def text(self, token_id: int) -> str:
        """The token as a string of its own; a part of a character is written `bytes:\\xe2\\x82`."""
        piece = self.data(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens drops it from the text."""
        return token_id in self._tokenizer.special_ids

    def name(self, token_id: int) -> bytes:
        """The text as a JSON string."""
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = orjson.dumps(self.text(token_id))
        return name

    def entry(self, token_id: int) -> tuple[bytes, bytes]:
        """A chat entry up to its logprob, and the `bytes` behind it."""
        entry = self._entries.get(token_id)
        if entry is None:
            start = b'{"token":%b,"logprob":' % self.name(token_id)
            entry = self._entries[token_id] = (
                start,
                b',"bytes":%b' % orjson.dumps(list(self.data(token_id))),
            )
        return entry


class LogprobsEncoder(Protocol):
    """One choice's log-probabilities. What was added is taken once, as the JSON value of the choice's `logprobs`."""

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Encode the next tokens."""

    def take(self) -> bytes:
        """JSON of all tokens since the last take."""


async def encode_whole(encoder: LogprobsEncoder, tokens: Sequence[TokenLogprobs]) -> bytes:
    """JSON of all of a choice's tokens; others run in between."""
    for start in range(0, len(tokens), AT_ONCE):
        encoder.add(tokens[start : start + AT_ONCE])
        await asyncio.sleep(0)
    return encoder.take()


class ChatLogprobs:
    """`{"content": […]}`: one entry per token, its bytes joining up to the text's."""

    __slots__ = ("_entries", "_num_top", "_skip_special", "_texts")

    def __init__(self, texts: TokenTexts, *, num_top: int, skip_special: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special
        self._entries: list[bytes] = []

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Encode the next tokens."""
        for _, ranked in tokens:
            top = b"},".join([self._open(*alternative) for alternative in ranked[1 : 1 + self._num_top]])
            close = b"}]}" if top else b"]}"
            self._entries.append(self._open(*ranked[0]) + b',"top_logprobs":[' + top + close)

    def take(self) -> bytes:
        """JSON of all tokens since the last take."""
        content = b",".join(self._entries)
        self._entries.clear()
        return b'{"content":[%b]}' % content

    def _open(self, token_id: int, logprob: float) -> bytes:
        """An entry but for its closing brace. A dropped special token adds no bytes to the text."""
        start, data = self._texts.entry(token_id)
        if self._skip_special and self._texts.is_special(token_id):
            data = b',"bytes":[]'
        return start + _number(logprob) + data


class CompletionLogprobs:
    """The four parallel lists of a choice; `text_offset` counts characters and runs on from chunk to chunk."""

    __slots__ = (
        "_chosen",
        "_decoder",
        "_num_top",
        "_offset",
        "_offsets",
        "_skip_special",
        "_texts",
        "_tokens",
        "_tops",
    )

    def __init__(self, texts: TokenTexts, *, num_top: int, skip_special: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets: list[int] = []
        self._chosen: list[bytes] = []
        self._tokens: list[bytes] = []
        self._tops: list[bytes] = []

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Encode the next tokens."""
        for _, ranked in tokens:
            token_id, logprob = ranked[0]
            self._offsets.append(self._offset)
            self._advance(token_id)
            self._chosen.append(_number(logprob))
            self._tokens.append(self._texts.name(token_id))
            self._tops.append(self._top(ranked))

    def take(self) -> bytes:
        """JSON of all tokens since the last take."""
        offsets = orjson.dumps(self._offsets)
        lists = [b",".join(values) for values in (self._chosen, self._tokens, self._tops)]
        for values in (self._offsets, self._chosen, self._tokens, self._tops):
            values.clear()
        return b'{"text_offset":%b,"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
            offsets,
            *lists,
        )

    def _advance(self, token_id: int) -> None:
        """Go past this token's text."""
        if not (self._skip_special and self._texts.is_special(token_id)):
            self._offset += len(self._decoder.decode(self._texts.data(token_id)))

    def _top(self, ranked: list[tuple[int, float]]) -> bytes:
        """The asked number of alternatives, and the chosen token in any case. Of equal texts the likeliest stays."""
        top: dict[bytes, bytes] = {}
        for token_id, logprob in [*ranked[1 : 1 + self._num_top], ranked[0]]:
            name = self._texts.name(token_id)
            if name not in top:
                top[name] = _number(logprob)
        return b"{" + b",".join([name + b":" + number for name, number in top.items()]) + b"}"


def _number(logprob: float) -> bytes:
    """JSON of a log-probability; what JSON cannot say (-Infinity, NaN) is MIN_LOGPROB: NaN is not above it."""
    return repr(max(MIN_LOGPROB, logprob)).encode()
