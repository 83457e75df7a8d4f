"""What the event loop does while no request is there: a little at a time, so that the next one hardly notices."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

PAUSE_S: Final = 0.02
"""Quiet before each turn of idle work. A client that sends its next request at once meets none, and a request that
comes in a pause is past the HTTP side before the pause is over: at most one turn holds it up."""
TURN_S: Final = 0.01
"""Idle work of one turn ends with the piece in which this is over."""


class IdleWork:
    """Calls `work` again and again in idle moments, until it says that there is no more. Belongs to one event loop."""

    __slots__ = ("_clock", "_is_idle", "_timer", "_work")

    def __init__(
        self, clock: asyncio.AbstractEventLoop, work: Callable[[], bool], is_idle: Callable[[], bool]
    ) -> None:
        """work: does one piece; False when there is no more. is_idle: asked before each piece."""
        self._clock = clock
        self._work = work
        self._is_idle = is_idle
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on it is idle. Again while it is: nothing."""
        if self._timer is None:
            self._timer = self._clock.call_later(PAUSE_S, self._turn)

    def stop(self) -> None:
        """It is idle no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        ends = perf_counter() + TURN_S
        more = True
        while more and self._is_idle() and perf_counter() < ends:
            more = self._work()
        if more:
            self.begin()
