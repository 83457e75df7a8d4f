"""Requests on their way from the connection to the engine's queue: read, but still being checked and tokenised."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Arrivals:
    """Who is on the way, so that a server that stops takes for the engine's what was asked before."""

    def __init__(self) -> None:
        self._numbers = count()
        self._under_way: set[int] = set()
        self._changed: asyncio.Event | None = None
        """Where somebody waits."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request for the time of the block, at whose end it is queued, or will not be."""
        number = next(self._numbers)
        self._under_way.add(number)
        try:
            yield
        finally:
            self._under_way.discard(number)
            if self._changed is not None:
                self._changed.set()

    async def passed(self, limit_s: float) -> None:
        """Until those that are under way now have ended, at most limit_s. Later ones are not waited for."""
        awaited, self._changed = set(self._under_way), asyncio.Event()
        try:
            async with asyncio.timeout(limit_s):
                while awaited & self._under_way:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # they are refused as what comes later
        finally:
            self._changed = None
