"""Blocking work off the loop, in a thread that never holds up the end of the process."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """The result of `work()`, run in a thread of its own.

    Unlike `asyncio.to_thread`, neither the loop's end nor the interpreter's waits for it: loading a model that nobody
    wants any more (Ctrl-C) is left behind.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # None only where T is None

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # handed over whole: the awaiting side decides
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
