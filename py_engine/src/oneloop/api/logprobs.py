"""Log-probabilities in the two wire forms. Token texts come from the vocabulary's bytes, never from decoded text."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneloop.engine.outputs import TokenLogprobs
    from oneloop.tokenize.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no -Infinity."""


class TokenTexts:
    """Text and bytes of single tokens."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int, *, skip_special: bool) -> bytes:
        """The bytes this token adds to the text. A model's rows beyond the vocabulary (padding) add nothing."""
        if token_id >= self._tokenizer.vocab_size:
            return b""
        if skip_special and token_id in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """The token as a string of its own; a part of a character is written `bytes:\\xe2\\x82`."""
        piece = self.data(token_id, skip_special=False)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatLogprobs:
    """Entries of `logprobs.content`: one per token, its bytes joining up to the text's."""

    __slots__ = ("_num_top", "_skip_special", "_texts")

    def __init__(self, texts: TokenTexts, *, num_top: int, skip_special: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special

    def entries(self, tokens: list[TokenLogprobs]) -> list[dict[str, Any]]:
        """Wire form of some tokens."""
        return [self._entry(ranked) for _, ranked in tokens]

    def _entry(self, ranked: list[tuple[int, float]]) -> dict[str, Any]:
        top = [self._token(*alternative) for alternative in ranked[1 : 1 + self._num_top]]
        return {**self._token(*ranked[0]), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._texts.data(token_id, skip_special=self._skip_special)),
        }


class CompletionLogprobs:
    """The four parallel lists of a completion choice. One object per choice: offsets run on from call to call."""

    __slots__ = ("_decoder", "_num_top", "_offset", "_skip_special", "_texts")

    def __init__(self, texts: TokenTexts, *, num_top: int, skip_special: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skip_special = skip_special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, tokens: list[TokenLogprobs]) -> dict[str, list[Any]]:
        """Wire form of the next tokens; text_offset counts characters."""
        offsets = [self._advance(ranked[0][0]) for _, ranked in tokens]
        return {
            "text_offset": offsets,
            "token_logprobs": [max(ranked[0][1], MIN_LOGPROB) for _, ranked in tokens],
            "tokens": [self._texts.text(ranked[0][0]) for _, ranked in tokens],
            "top_logprobs": [self._top(ranked) for _, ranked in tokens],
        }

    def _advance(self, token_id: int) -> int:
        """Where this token's text starts."""
        start = self._offset
        self._offset += len(self._decoder.decode(self._texts.data(token_id, skip_special=self._skip_special)))
        return start

    def _top(self, ranked: list[tuple[int, float]]) -> dict[str, float]:
        """The asked number of alternatives, and the chosen token in any case. Of equal texts the likeliest stays."""
        top: dict[str, float] = {}
        for token_id, logprob in [*ranked[1 : 1 + self._num_top], ranked[0]]:
            top.setdefault(self._texts.text(token_id), max(logprob, MIN_LOGPROB))
        return top
