"""Logging for a server: a thread of its own writes the records, so that a blocked terminal never holds the loop."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAITING_RECORDS = 10_000
"""Beyond these, records are dropped: the log's reader is blocked."""
END_LIMIT_S = 1.0


class _DroppingHandler(logging.handlers.QueueHandler):
    """Hands records over without ever waiting."""

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            return


@contextmanager
def logging_to_stderr(level: str = "INFO") -> Iterator[None]:
    """Log to stderr from a thread; what waits at the end is written out, unless nobody reads for END_LIMIT_S."""
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING_RECORDS)
    writer = logging.StreamHandler()
    writer.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler = _DroppingHandler(records)
    thread = threading.Thread(target=_write_records, args=(records, writer), name="oneloop-log", daemon=True)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    thread.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        with contextlib.suppress(queue.Full):
            records.put(None, timeout=END_LIMIT_S)
            thread.join(END_LIMIT_S)


def _write_records(records: queue.Queue[logging.LogRecord | None], writer: logging.Handler) -> None:
    while (record := records.get()) is not None:
        writer.handle(record)
