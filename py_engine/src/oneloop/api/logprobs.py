"""Log-probabilities in the two wire forms: the core encodes them (`LogprobsEncoder`), here and on its relay.

A reply may hold millions of entries (n x tokens x alternatives), and encoding runs on the event loop: whole replies
give way after every `AT_ONCE` tokens.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from oneloop_core import LogprobsEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.outputs import TokenLogprobs
    from oneloop.engine.params import ResolvedParams
    from oneloop.tokenize.tokenizer import Tokenizer

AT_ONCE = 256
"""Tokens of a whole reply that are encoded before others get a turn: about AT_ONCE_MS ms with 20 alternatives each."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a string of its own, as `LogprobsEncoder` names it; a part of a character is `bytes:\\xe2\\x82`.

    A model's rows beyond the vocabulary (padding) have no text.
    """
    piece = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def make_encoders(
    tokenizer: Tokenizer, form: Literal["chat", "completion"], params: ResolvedParams, num_choices: int
) -> list[LogprobsEncoder] | None:
    """One per choice; None where no log-probabilities are asked for."""
    if params.logprobs is None:
        return None
    return [
        LogprobsEncoder(
            tokenizer.vocabulary,
            form,
            num_top=params.logprobs,
            skip_special_tokens=params.skip_special_tokens,
        )
        for _ in range(num_choices)
    ]


async def encode_whole(encoder: LogprobsEncoder, tokens: Sequence[TokenLogprobs]) -> bytes:
    """JSON of all of a choice's tokens; others run in between."""
    for start in range(0, len(tokens), AT_ONCE):
        encoder.add(tokens[start : start + AT_ONCE])
        await asyncio.sleep(0)
    return encoder.take()
