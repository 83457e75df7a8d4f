"""Steps in flight on a device: in which order they end, and what the event loop hears of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from oneloop.errors import EngineDeadError
from oneloop.executor.base import Completion
from oneloop_core import CompletionWatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
"""How often a device that finishes nothing is asked whether it has failed."""


class DeviceCompletions:
    """Numbers the steps; the device writes the number of the last finished one into `word`.

    A native thread watches the word and makes the descriptor readable. A device that fails writes no more: a second
    thread asks it (`check_device`, which raises then) when a step has been the oldest in flight for a second.
    """

    def __init__(self, word: npt.NDArray[np.int64], check_device: Callable[[], object]) -> None:
        """word: [1], in memory that the device writes and that lives as long as this object."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watcher = CompletionWatcher(word.data, self._fd)
        self._check_device = check_device
        self._in_flight: deque[tuple[int, int]] = deque()
        self._failed: dict[int, str] = {}
        self._last = 0
        self._broken: str | None = None
        self._closing = threading.Event()
        self._guard = threading.Thread(target=self._watch_device, name="oneloop-device-guard", daemon=True)
        self._guard.start()

    def fileno(self) -> int:
        """The descriptor to watch for reading."""
        return self._fd

    def next_number(self, slab_index: int) -> int:
        """A number for the step in that slab, which is about to be launched."""
        self._last += 1
        self._in_flight.append((self._last, slab_index))
        return self._last

    def launched(self, number: int, error: str | None = None) -> None:
        """The step is on its way. error: why its results are void; it ends in its turn nevertheless."""
        if error is not None:
            self._failed[number] = error
        self._watcher.expect(number)

    def give_up(self, reason: str) -> None:
        """The device takes no more work: nothing that is in flight will end."""
        self._broken = reason

    def take(self) -> list[Completion]:
        """Steps that have ended, in order; clears the descriptor. Raises EngineDeadError when the device has failed."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._broken is not None:
            raise EngineDeadError(self._broken)
        done = self._watcher.completed
        completions = []
        while self._in_flight and self._in_flight[0][0] <= done:
            number, slab_index = self._in_flight.popleft()
            completions.append(Completion(slab_index, self._failed.pop(number, None)))
        return completions

    def wait_idle(self, limit_s: float) -> bool:
        """Block until all steps have ended, or the time is up. For shutdown."""
        limit = time.monotonic() + limit_s
        while self._broken is None and self._watcher.completed < self._last:
            if time.monotonic() > limit:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """End the threads and free the descriptor. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.close()
        self._guard.join()
        os.close(self._fd)

    def _watch_device(self) -> None:
        done_before = last_before = 0
        while not self._closing.wait(_CHECK_INTERVAL_S):
            done, last = self._watcher.completed, self._last
            # The step that was the oldest in flight a tick ago still is.
            if done == done_before < last_before:
                try:
                    self._check_device()
                except Exception as error:  # whatever the driver says, nothing more will come
                    log.exception("the device has failed")
                    self._broken = f"the device has failed ({type(error).__name__})"
                    os.eventfd_write(self._fd, 1)
                    return
            done_before, last_before = done, last
