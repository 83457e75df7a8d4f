"""What streamed replies have to send, sent in slices between the event loop's other work.

The engine's loop only tells that there is news; nothing is encoded or written while it delivers a step. So the next
step's end is seen within a slice however many clients there are, and a reply whose turn comes late sends two steps as
one chunk: clients get fewer, larger chunks where the engine is faster than their connections are served.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from oneloop.engine.loop_times import LoopTimes

SLICE_S = 0.0005
"""How long the outbox holds the loop at a time."""


class Sender(Protocol):
    """A reply with something to send."""

    def send_news(self) -> None:
        """Send it. Must not raise: an error is its own reply's."""


class Outbox:
    """The senders whose turn has not come, in order. One per application; belongs to the running event loop."""

    __slots__ = ("_due", "_scheduled", "_times")

    def __init__(self, times: LoopTimes) -> None:
        """times: where the time it takes is counted."""
        self._times = times
        self._due: deque[Sender] = deque()
        self._scheduled = False

    def post(self, sender: Sender) -> None:
        """Call `sender.send_news()` soon. Once per post: a sender posts again only after its turn."""
        self._due.append(sender)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        due, began = self._due, perf_counter()
        until, now = began + SLICE_S, began
        while due and now < until:
            due.popleft().send_news()
            now = perf_counter()
        self._times.parts["send"] += now - began
        self._scheduled = bool(due)
        if due:
            asyncio.get_running_loop().call_soon(self._send)
