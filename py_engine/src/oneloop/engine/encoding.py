"""Tokenising off the loop: short texts that come together go to a thread together.

A hand-over to a thread and back costs the loop as much as tokenising a short text costs the thread, mostly in waiting
for the GIL. So while one batch is out, what comes meanwhile becomes the next; nothing waits when there is nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from oneloop.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from oneloop.tokenize.tokenizer import Tokenizer

T = TypeVar("T")

LONG_CHARS = 1 << 14
"""Longer texts go alone and one after the other: they leave the other threads to the short ones."""
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
        self._long = asyncio.Semaphore(1)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises what the tokenizer raises for it; EngineClosedError as in_thread()."""
        if len(text) > LONG_CHARS:
            async with self._long:
                return await in_thread(
                    self._threads,
                    lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
                )
        loop = asyncio.get_running_loop()
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
        except RuntimeError:  # the threads were shut down
            self._is_out = False
            batch += self._waiting
            self._waiting.clear()
            _settle(batch, [_shut_down()] * len(batch))

    def _receive(self, batch: list[_Text], found: Future[list[list[int] | Exception]]) -> None:
        """Back on the loop."""
        self._send()
        error = _shut_down() if found.cancelled() else found.exception()
        _settle(batch, found.result() if error is None else [error] * len(batch))

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


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Result of `work()` in one of the threads. EngineClosedError where they are shut down before it begins."""
    try:
        future = threads.submit(work)
    except RuntimeError:
        raise _shut_down() from None
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # our caller is not wanted any more
            raise
        raise _shut_down() from None


def _shut_down() -> EngineClosedError:
    return EngineClosedError("the engine was shut down before the text was read")


def _settle(batch: list[_Text], found: Sequence[list[int] | BaseException]) -> None:
    for one, result in zip(batch, found, strict=True):
        if one.token_ids.done():
            continue
        if isinstance(result, BaseException):
            one.token_ids.set_exception(result)
        else:
            one.token_ids.set_result(result)
