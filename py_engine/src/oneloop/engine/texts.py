"""The text side of one model: tokenising, detokenising and rendering, all in threads of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from oneloop.engine.encoding import Encoding, in_thread
from oneloop.engine.params import check_token_ids, encode_utf8
from oneloop.tokenize.conversation import ChatForm, Conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.tokenize.renderer import Renderer
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Vocabulary

T = TypeVar("T")

NUM_THREADS = 2
"""Tokenising and rendering threads: a huge prompt takes one, and does not hold up the small ones."""


class Texts:
    """Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="oneloop-intake")
        self._encoding = Encoding(tokenizer, self._threads)
        self._foreign = asyncio.Semaphore(1)
        """Templates that requests bring take one thread at most: whoever sends a slow one waits for his own."""
        self._id_vocabulary: Vocabulary | None = None

    def close(self) -> None:
        """Refuse what waits for a thread; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. RequestError for lone surrogates."""
        encode_utf8("prompt", text)
        return await self._encoding.encode(text, add_special_tokens=add_special_tokens)

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """encode(), and for each token the characters [start, end) of the text that it stands for."""
        encode_utf8("prompt", text)
        return await self.in_thread(
            lambda: self.tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
        )

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids. RequestError naming the first id out of range."""
        vocabulary = self.tokenizer.vocabulary
        check_token_ids("tokens", token_ids, len(vocabulary))
        return await self.in_thread(
            lambda: vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def render(self, conversation: Conversation | Callable[[], Conversation], form: ChatForm) -> str:
        """A prompt's text. conversation: or what makes it, also in the thread. RequestError names the field."""

        def work() -> str:
            found = conversation if isinstance(conversation, Conversation) else conversation()
            return self.renderer.render_text(found, form)

        if form.chat_template is None:
            return await self.in_thread(work)
        async with self._foreign:
            return await self.in_thread(work)

    async def id_vocabulary(self) -> Vocabulary:
        """As Tokenizer.id_vocabulary(), made at its first use."""
        if self._id_vocabulary is None:
            self._id_vocabulary = await self.in_thread(self.tokenizer.id_vocabulary)
        return self._id_vocabulary

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run text work off the loop. EngineClosedError once this is closed."""
        return await in_thread(self._threads, work)
