"""Logging for a server: a thread of its own writes the records, so that a blocked terminal never holds the loop."""

from __future__ import annotations

import logging
import logging.handlers
import queue
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAITING_RECORDS = 10_000
"""Beyond these, records are dropped: the log's reader is blocked."""


class _DroppingHandler(logging.handlers.QueueHandler):
    """Hands records over without ever waiting."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


@contextmanager
def logging_to_stderr(level: int = logging.INFO) -> Iterator[None]:
    """Log to stderr from a thread; writes out what waits at the end."""
    records: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING_RECORDS)
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler = _DroppingHandler(records)
    listener = logging.handlers.QueueListener(records, writer)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        listener.stop()
