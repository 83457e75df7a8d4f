"""CompletionQueue: how an executor's thread tells the event loop that steps have ended.

A descriptor that the loop watches: an eventfd where the system has one, else a pipe.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneloop.executor.base import Completion


class CompletionQueue:
    """`put` from any thread, `take` from the loop's. The descriptor is readable while something waits."""

    def __init__(self, *, use_pipe: bool = not hasattr(os, "eventfd"), one_at_a_time: bool = False) -> None:
        """use_pipe: a pipe instead of an eventfd (systems other than Linux).

        one_at_a_time: `take` gives at most one.
        """
        # A deque's append and popleft are atomic; the descriptor is written after the append and cleared before
        # the pops, so a completion is at worst announced once too often, never missed.
        self._waiting: deque[Completion] = deque()
        self._close_lock = threading.Lock()
        self._is_eventfd = not use_pipe
        self._one_at_a_time = one_at_a_time
        if self._is_eventfd:
            counting = os.EFD_SEMAPHORE if one_at_a_time else 0
            self._read_fd = self._write_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | counting)
        else:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
        self._closed = False

    def fileno(self) -> int:
        """The descriptor to watch for reading."""
        return self._read_fd

    def put(self, completion: Completion) -> None:
        """Announce the end of a step. After close(): nobody listens, nothing happens."""
        self._waiting.append(completion)
        with self._close_lock:
            if self._closed:
                return
            if self._is_eventfd:
                os.eventfd_write(self._write_fd, 1)
                return
            # A full pipe is readable, which is all that is wanted.
            with contextlib.suppress(BlockingIOError):
                os.write(self._write_fd, b"\0")

    def take(self) -> list[Completion]:
        """Everything that waits (or the first of it), in order; clears what announced it. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 8 if self._is_eventfd else 1 if self._one_at_a_time else 4096)
        count = len(self._waiting)
        return [self._waiting.popleft() for _ in range(min(count, 1) if self._one_at_a_time else count)]

    def close(self) -> None:
        """Free the descriptors. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._read_fd)
            if not self._is_eventfd:
                os.close(self._write_fd)
