"""Log-probabilities of whole replies, and what a token is called. Of streams the relay writes most.

A reply may hold millions of entries (n x tokens x alternatives), and encoding runs on the event loop: whole replies
give way after every `AT_ONCE` entries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import TokenLogprobs
    from oneloop.tokenize.tokenizer import Tokenizer

AT_ONCE = 5_000
"""Entries of a whole reply that are encoded before others get a turn: about half a ms."""


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
    step = max(AT_ONCE // len(tokens[0][1]), 1) if tokens else 1
    for start in range(0, len(tokens), step):
        encoder.add(tokens[start : start + step])
        await asyncio.sleep(0)
    return encoder.take()
