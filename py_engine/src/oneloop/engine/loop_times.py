"""Where the event loop's time goes: seconds by part, the lengths of its turns, the collector's pauses.

Always on: two readings of the clock per part of a step, two per turn of the loop. A turn is everything between two
looks at the descriptors, so its length is how late the loop may see what happened meanwhile.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from oneloop.engine.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

Part = Literal["schedule", "submit", "commit", "mask", "deliver", "send", "parse", "queue", "prepare"]
PARTS: dict[Part, str] = {
    "schedule": "the core decides a step",
    "submit": "the executor launches it",
    "commit": "the core takes its results",
    "mask": "the core computes which tokens may come, and the executor samples",
    "deliver": "deltas go to their streams",
    "send": "events are encoded and written to the sockets",
    "parse": "requests are checked",
    "queue": "requests are handed to the core",
    "prepare": "the executor prepares later steps while no request is there",
}
TURN_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class LoopTimes:
    """Counted by whoever does the work, read by /metrics. Belongs to one event loop."""

    __slots__ = ("_gc_began", "gc_longest_s", "gc_pauses", "parts", "turns", "urgent")

    def __init__(self) -> None:
        self.parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Seconds. What the turns took beyond their sum is HTTP, tasks, timers and tokenising's hand-overs."""
        self.turns = Histogram(TURN_S)
        """Seconds of the loop's turns; empty on an event loop that does not tell (see event_loop.py)."""
        self.gc_pauses = Histogram(TURN_S)
        """Seconds of garbage collections, in which no Python runs."""
        self.gc_longest_s = 0.0
        self.urgent: set[int] = set()
        """Descriptors that are looked at in every turn, before the others."""
        self._gc_began = 0.0

    @contextmanager
    def watching_gc(self) -> Iterator[None]:
        """Count the interpreter's collections meanwhile."""
        gc.callbacks.append(self._note_gc)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note_gc)

    def _note_gc(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = perf_counter()
            return
        pause = perf_counter() - self._gc_began
        self.gc_pauses.observe(pause)
        self.gc_longest_s = max(self.gc_longest_s, pause)
