"""The one tokenizer type of the engine: text → ids, ids → text, and the vocabulary bytes the core detokenises with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oneloop.errors import RequestError
from oneloop_core import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tokenizers

    from oneloop.tokenize.templates import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What a tokenizer file says besides how to cut text."""

    vocabulary: Vocabulary
    """Bytes of every token and which are special; what the core detokenises with."""
    special_ids: frozenset[int]
    """Ids that skip_special_tokens drops."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a turn or a text, without duplicates; the main one first."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Names as chat templates use them (bos_token, eos_token, …) → text."""
    chat_template: ChatTemplate | None = None


class Tokenizer:
    """Immutable and thread-safe: encode and decode may run in any number of threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, info: TokenizerInfo) -> None:
        self._backend = backend
        self._info = info

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text are recognised.

        add_special_tokens: also add what the tokenizer puts around a plain prompt (mostly a BOS), but no second begin
        token before a text that has one. Chat templates write theirs themselves. RequestError for text that has no
        UTF-8 form (lone surrogates).
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """encode() of several texts, on several cores; the GIL is taken once for all. RuntimeError when it panics."""
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "prompt", "text holds lone surrogates, which no UTF-8 text can hold"
            ) from error
        except (Exception, KeyboardInterrupt):
            raise
        except (
            BaseException
        ) as panic:  # a panic of Rust's is no Exception: whoever handles those would not see it
            raise RuntimeError("the tokenizer has failed") from panic
        return [self._begun_once(encoding.ids) if add_special_tokens else encoding.ids for encoding in found]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """encode(), and for each token the characters of the text that it stands for: [start, end)."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        offsets: list[tuple[int, int]] = encoding.offsets
        return ids, offsets[len(offsets) - len(ids) :]

    def id_vocabulary(self) -> Vocabulary:
        """A vocabulary whose tokens' texts are their own names, "token_id:5": for those who keep tokens as ids."""
        return Vocabulary([b"token_id:%d" % token_id for token_id in range(self.vocab_size)])

    def _begun_once(self, ids: list[int]) -> list[int]:
        """Without the begin token that was added before the text's own."""
        bos = self._info.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; malformed UTF-8 becomes U+FFFD. IndexError for an id out of range."""
        return self.vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which may be a part of a character. IndexError when out of range."""
        return self.vocabulary.piece(token_id)

    def token_str(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary (as the tokenizer file writes it)."""
        return self._backend.token_to_id(token)

    @property
    def vocabulary(self) -> Vocabulary:
        """Bytes of every token, for the core's detokenizer."""
        return self._info.vocabulary

    @property
    def vocab_size(self) -> int:
        """Ids that have a place in the vocabulary; a model may have more (padding) rows."""
        return len(self._info.vocabulary)

    @property
    def bos_token_id(self) -> int | None:
        return self._info.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._info.eos_token_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._info.special_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._info.special_tokens

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None for a base model."""
        return self._info.chat_template
