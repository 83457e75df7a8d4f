"""Where every thread and every task of the event loop stands, as text. Reads no source files, so it blocks nothing."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

MAX_FRAMES: Final = 64
"""Of one stack."""
MAX_TASKS: Final = 2000
"""That are looked at: each takes some µs."""
MAX_GROUPS: Final = 200
"""Different stacks of tasks that are shown."""

Stack = tuple[str, ...]
"""Innermost frame first."""


def describe_stacks() -> str:
    """All threads, then the running loop's tasks, equal stacks together. For the loop's thread."""
    return "\n".join([*_thread_lines(), *_task_lines()]) + "\n"


def _thread_lines() -> list[str]:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"{len(frames)} threads"]
    for ident, frame in frames.items():
        here = " (this one: the event loop's)" if ident == threading.get_ident() else ""
        lines += ["", f"thread {names.get(ident, ident)}{here}", *_indented(_thread_stack(frame))]
    return lines


def _thread_stack(frame: FrameType | None) -> Stack:
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(_place(frame))
        frame = frame.f_back
    return tuple(found)


def _task_lines() -> list[str]:
    tasks = asyncio.all_tasks()
    names: dict[Stack, str] = {}
    counts: Counter[Stack] = Counter()
    for task in islice(tasks, MAX_TASKS):
        stack = _task_stack(task)
        counts[stack] += 1
        names.setdefault(stack, task.get_name())
    looked_at = f", {MAX_TASKS} of them looked at" if len(tasks) > MAX_TASKS else ""
    lines = ["", f"{len(tasks)} tasks{looked_at}"]
    for stack, count in counts.most_common(MAX_GROUPS):
        others = f" and {count - 1} more" if count > 1 else ""
        lines += ["", f"task {names[stack]}{others}", *_indented(stack)]
    if len(counts) > MAX_GROUPS:
        lines += ["", f"and {len(counts) - MAX_GROUPS} other stacks"]
    return lines


def _task_stack(task: asyncio.Task[object]) -> Stack:
    """From what the task awaits outwards. Beyond an async generator's step the interpreter does not tell."""
    found: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None and len(found) < MAX_FRAMES:
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isasyncgen(awaited):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            found.append(f"<{type(awaited).__name__}>")
            break
        if frame is not None:
            found.append(_place(frame))
    return tuple(reversed(found))


def _place(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "?")
    return f"{module}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _indented(stack: Stack) -> list[str]:
    return [f"    {line}" for line in stack]
