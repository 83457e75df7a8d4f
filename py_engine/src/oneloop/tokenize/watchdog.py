"""A time limit for code that cannot be asked to stop: an exception raised in its thread from outside."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RETRY_S = 0.05


class TimeLimitError(BaseException):
    """Raised in the watched code. A BaseException, so that no `except Exception` in between swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in this thread when the body runs longer than `seconds`.

    It arrives between two bytecodes: a single long call into C is not cut short (the template sandbox bounds those).
    Only one limit per thread at a time.
    """
    thread_id = threading.get_ident()
    finished = threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        delay = seconds
        while not finished.wait(delay):
            with lock:
                if finished.is_set():
                    return
                _raise_in_thread(thread_id, TimeLimitError)
            delay = _RETRY_S  # a handler may have swallowed it

    watcher = threading.Thread(target=watch, name="template-time-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            finished.set()
            _raise_in_thread(thread_id, None)  # takes back one that is on its way


def _raise_in_thread(thread_id: int, kind: type[BaseException] | None) -> None:
    """CPython's PyThreadState_SetAsyncExc; None clears an exception that is still pending."""
    argument = ctypes.py_object(kind) if kind is not None else ctypes.py_object()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), argument)
