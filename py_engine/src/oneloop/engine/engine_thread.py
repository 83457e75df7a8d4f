"""EngineThread: an AsyncEngine on an event loop of its own in a background thread, for callers without a loop.

`LLM`, `oneloop chat` and `oneloop generate` stand on it. It works inside a running event loop too (notebooks), and
Ctrl-C in the calling thread cancels what that thread was waiting for.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from oneloop.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from concurrent.futures import Future

    from oneloop.engine.async_engine import AsyncEngine
    from oneloop.executor.base import LoadProgress

T = TypeVar("T")

CLOSE_LIMIT_S = 10.0
"""How long close() waits for the thread; a step in flight may keep it busy for longer than anyone wants to wait."""


class EngineThread:
    """Starts the engine and its loop at once; `close()`, or the end of the process, stops both."""

    def __init__(self, engine: AsyncEngine, progress: LoadProgress | None = None) -> None:
        """Blocks until the model is loaded. Raises what AsyncEngine.start() raises."""
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="oneloop-loop", daemon=True)
        self._thread.start()
        # Runs at exit as well, while daemon threads still live.
        self._finalizer = weakref.finalize(self, _close, engine, self._loop, self._thread)
        try:
            self.run(engine.start(progress))
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception here (Ctrl-C) cancels it."""
        future = self.spawn(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's loop."""
        if not self._finalizer.alive:
            work.close()
            raise EngineDeadError("the engine was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def iterate(self, items: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """What an async iterator on the engine's loop yields. Leaving early cancels it."""
        waiting: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

        async def pump() -> None:
            async for item in items():
                waiting.put((True, item))

        future = self.spawn(pump())
        future.add_done_callback(lambda done: waiting.put((False, done)))
        try:
            while True:
                more, item = waiting.get()
                if not more:
                    break
                yield item
        finally:
            future.cancel()
        try:
            future.result()
        except CancelledError:
            raise EngineDeadError("the engine was closed") from None

    def close(self) -> None:
        """Abort what runs, free the model, end the thread. Idempotent."""
        self._finalizer()


def _close(engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def end() -> None:
        await engine.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await loop.shutdown_asyncgens()

    ended = asyncio.run_coroutine_threadsafe(end(), loop)
    ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    thread.join(CLOSE_LIMIT_S)
    if not thread.is_alive():
        loop.close()
