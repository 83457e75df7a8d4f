"""Tokenising off the loop: short texts that come together go to a thread together.

A hand-over to a thread and back costs the loop as much as tokenising a short text costs the thread, mostly in waiting
for the GIL. So while one batch is out, what comes meanwhile becomes the next; nothing waits when there is nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from oneloop.tokenize.tokenizer import Tokenizer

LONG_CHARS = 1 << 14
"""Longer texts have a thread to themselves, so that they hold nobody up."""
BATCH = 16
"""Texts of one hand-over: all their requests go on in the same turn of the loop."""


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    add_special_tokens: bool
    token_ids: asyncio.Future[list[int]]


class Encoding:
    """Encodes texts in the threads it is given. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, threads: ThreadPoolExecutor) -> None:
        self._tokenizer = tokenizer
        self._threads = threads
        self._waiting: deque[_Text] = deque()
        self._is_out = False
        """Whether a batch is on its way, or about to be."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises what the tokenizer raises for it."""
        loop = asyncio.get_running_loop()
        if len(text) > LONG_CHARS:
            return await loop.run_in_executor(
                self._threads, lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )
        one = _Text(text, add_special_tokens, loop.create_future())
        self._waiting.append(one)
        if not self._is_out:
            self._is_out = True
            loop.call_soon(self._send)  # so that the others of this turn come along
        return await one.token_ids

    def _send(self) -> None:
        """Hand the next batch over; texts whose requests are gone are left out."""
        batch: list[_Text] = []
        while self._waiting and len(batch) < BATCH:
            one = self._waiting.popleft()
            if not one.token_ids.done():
                batch.append(one)
        self._is_out = bool(batch)
        if not batch:
            return
        loop = asyncio.get_running_loop()

        def ended(found: Future[list[list[int] | Exception]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(self._receive, batch, found)

        try:
            self._threads.submit(self._encode_all, batch).add_done_callback(ended)
        except RuntimeError as error:  # the threads were shut down
            self._is_out = False
            _settle(batch, [error] * len(batch))

    def _receive(self, batch: list[_Text], found: Future[list[list[int] | Exception]]) -> None:
        """Back on the loop."""
        self._send()
        if found.cancelled():
            _settle(batch, [asyncio.CancelledError()] * len(batch))
        else:
            _settle(batch, found.result())

    def _encode_all(self, batch: list[_Text]) -> list[list[int] | Exception]:
        """In a thread. A text that cannot be encoded spoils no other's result."""
        found: list[list[int] | Exception] = [[]] * len(batch)
        for add_special_tokens in (True, False):
            places = [
                place for place, one in enumerate(batch) if one.add_special_tokens is add_special_tokens
            ]
            texts = [batch[place].text for place in places]
            try:
                results: Sequence[list[int] | Exception] = self._tokenizer.encode_batch(
                    texts, add_special_tokens=add_special_tokens
                )
            except Exception:
                results = [self._encode_one(text, add_special_tokens) for text in texts]
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    def _encode_one(self, text: str, add_special_tokens: bool) -> list[int] | Exception:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # told to the one who asked
            return error


def _settle(batch: list[_Text], found: Sequence[list[int] | BaseException]) -> None:
    for one, result in zip(batch, found, strict=True):
        if one.token_ids.done():
            continue
        if isinstance(result, asyncio.CancelledError):
            one.token_ids.cancel()
        elif isinstance(result, BaseException):
            one.token_ids.set_exception(result)
        else:
            one.token_ids.set_result(result)
