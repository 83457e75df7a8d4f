"""The server's log: written elsewhere than on the loop, and a blocked reader holds nobody up."""

import io
import logging
import sys
import threading
import time

from oneloop.cli import logs
from oneloop.cli.logs import logging_to_stderr

log = logging.getLogger("oneloop.test")


def test_records_arrive_in_order_and_completely(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with logging_to_stderr():
        for number in range(100):
            log.info("record %d", number)
    lines = written.getvalue().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == [str(number) for number in range(100)]
    log.info("after")
    assert "after" not in written.getvalue()


def test_a_blocked_terminal_blocks_nobody(monkeypatch):
    released = threading.Event()

    class Blocked(io.StringIO):
        def write(self, text):
            released.wait()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Blocked())
    monkeypatch.setattr(logs, "MAX_WAITING_RECORDS", 50)
    begin = time.monotonic()
    with logging_to_stderr():
        for number in range(1000):
            log.info("record %d", number)
        assert time.monotonic() - begin < 1
    assert time.monotonic() - begin < 3
    released.set()
