"""A time limit for code that cannot be asked to stop: it runs in a thread of its own, where an exception is raised.

The thread belongs to the one call, so an exception that arrives late meets nobody else's code.
"""

from __future__ import annotations

import _thread
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_RETRY_S = 0.05
_MAX_ATTEMPTS = 100


class TimeLimitError(Exception):
    """The function ran longer than it may."""


class _StopError(BaseException):
    """What is raised in the thread. A BaseException, so that no `except Exception` in between swallows it."""


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


def run_limited(function: Callable[[], T], seconds: float) -> T:
    """function()'s result or exception; TimeLimitError when it runs longer than `seconds`.

    The exception arrives between two bytecodes, so a single long call into C is waited for, up to
    _MAX_ATTEMPTS · _RETRY_S; after that the thread is left to end by itself.
    """
    outcome: list[T | _Failure] = []
    started, done, leave = (_held_lock() for _ in range(3))

    def work() -> None:
        # CPython delivers the exception after a call or a jump back: `try` covers every place where it can arrive
        try:
            started.release()
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(_Failure(error))
            done.release()
            # the thread's id must stay its own as long as an exception may be sent to it
            leave.acquire()
        except _StopError:
            if done.locked():
                done.release()

    thread_id = _thread.start_new_thread(work, ())
    finished = False
    try:
        started.acquire()
        finished = done.acquire(timeout=seconds)
    finally:  # also when the caller itself is interrupted
        if not finished:
            _stop(thread_id, done)
        leave.release()
    if not finished:
        raise TimeLimitError
    kept = outcome.pop()
    if not isinstance(kept, _Failure):
        return kept
    try:
        raise kept.error
    finally:
        # the error's traceback holds this frame: what it was about would stay until the collector comes by
        del kept


def _held_lock() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


def _stop(thread_id: int, done: _thread.LockType) -> None:
    for _ in range(_MAX_ATTEMPTS):
        reached = _raise_in_thread(thread_id)
        if done.acquire(timeout=_RETRY_S) or not reached:
            return


def _raise_in_thread(thread_id: int) -> bool:
    """CPython's PyThreadState_SetAsyncExc: whether there was such a thread."""
    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(_StopError)
    )
    return bool(found)
