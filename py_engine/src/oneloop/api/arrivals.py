"""Requests on their way from the connection to the engine's queue: read, but still being checked and tokenised."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from oneloop.errors import ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Arrivals:
    """How many are on the way: a server that stops takes for the engine's what was asked before, and nothing more."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._is_closed = False
        self._nobody = asyncio.Event()
        """Set while none is under way."""
        self._nobody.set()

    @property
    def is_closed(self) -> bool:
        """Whether who comes now is refused."""
        return self._is_closed

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request for the time of the block, at whose end it is queued, or will not be.

        ShuttingDownError for one that comes too late.
        """
        if self._is_closed:
            raise ShuttingDownError
        self._num_under_way += 1
        self._nobody.clear()
        try:
            yield
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._nobody.set()

    async def close(self, limit_s: float) -> None:
        """Let no more in, and wait for those under way, at most limit_s; the engine refuses who is later still."""
        self._is_closed = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._nobody.wait(), limit_s)
