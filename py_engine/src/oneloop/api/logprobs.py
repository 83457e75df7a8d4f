"""Log-probabilities of whole replies, and what a token is called. Of streams the relay writes most.

A reply may hold millions of entries (n x tokens x alternatives), and encoding runs on the event loop: whole replies
give way after every `AT_ONCE` tokens.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import TokenLogprobs
    from oneloop.tokenize.tokenizer import Tokenizer

AT_ONCE = 256
"""Tokens of a whole reply that are encoded before others get a turn: about half a ms with 20 alternatives each."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a string of its own, as `LogprobsEncoder` names it; a part of a character is `bytes:\\xe2\\x82`.

    A model's rows beyond the vocabulary (padding) have no text.
    """
    piece = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


async def encode_whole(encoder: LogprobsEncoder, tokens: Sequence[TokenLogprobs]) -> bytes:
    """JSON of all of a choice's tokens; others run in between."""
    for start in range(0, len(tokens), AT_ONCE):
        encoder.add(tokens[start : start + AT_ONCE])
        await asyncio.sleep(0)
    return encoder.take()
