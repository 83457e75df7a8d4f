"""An event loop whose turns are short, whatever comes in at once.

asyncio calls everything that is readable before it looks again: a burst of 500 connections is one turn of a tenth of a
second, in which no running stream gets its tokens. Here a turn takes a few descriptors; the kernel hands out the others
in the turns that follow, none twice before each had its turn. The engine's own descriptor is looked at in every turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
from collections.abc import Mapping
from select import EPOLLIN, EPOLLOUT, epoll
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import FileDescriptorLike

    from oneloop.engine.loop_times import LoopTimes

EVENTS_PER_TURN = 8
"""A request's bytes and what they set off take a hundred or two µs: so few that a turn stays near two milliseconds, of
which running streams have half for their tokens in a burst (the slices of relay.py and of the API's outbox)."""
MAX_EVENTS_PER_TURN = 16
"""While they take less: looking costs some µs a turn, and the engine's descriptor is looked at in every one."""
_SHORT_TURN_S, _LONG_TURN_S = 0.0003, 0.001
"""After a full turn below the first twice as many are taken, after any turn above the second half as many."""


def turn_loop(times: LoopTimes) -> Callable[[], asyncio.AbstractEventLoop]:
    """A loop factory, for asyncio.Runner, of loops that count their turns in `times`."""
    return lambda: asyncio.SelectorEventLoop(TurnSelector(times))


class TurnSelector(selectors.BaseSelector):
    """epoll that reports a few descriptors, after those in `times.urgent`: EVENTS_PER_TURN, more of short ones."""

    def __init__(self, times: LoopTimes) -> None:
        self._times = times
        self.keys: dict[int, selectors.SelectorKey] = {}
        """By descriptor."""
        self._epoll = epoll()
        self._urgent = epoll()
        self._epoll.register(self._urgent.fileno(), EPOLLIN)  # so that what is urgent ends the wait
        self._began = perf_counter()
        self._at_most = EVENTS_PER_TURN
        self._was_full = False

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """As BaseSelector. KeyError when it is registered already."""
        fd = _fd(fileobj)
        if fd in self.keys:
            raise KeyError(f"descriptor {fd} is registered already")
        self._epoll_of(fd).register(fd, _mask(events))
        key = self.keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """As BaseSelector. A descriptor that was closed already is no error."""
        key = self.keys.pop(self._lookup(fileobj))
        with contextlib.suppress(OSError):
            self._epoll_of(key.fd).unregister(key.fd)
        return key

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """As BaseSelector."""
        key = self.keys[self._lookup(fileobj)]
        if events != key.events:
            self._epoll_of(key.fd).modify(key.fd, _mask(events))
        key = self.keys[key.fd] = key._replace(events=events, data=data)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As BaseSelector, but a few at a time. The end of a turn and the beginning of the next."""
        turn_s = perf_counter() - self._began
        self._times.turns.observe(turn_s)
        if turn_s > _LONG_TURN_S:
            self._at_most = max(self._at_most // 2, EVENTS_PER_TURN)
        elif self._was_full and turn_s < _SHORT_TURN_S:
            self._at_most = min(2 * self._at_most, MAX_EVENTS_PER_TURN)
        # Rounded up to what epoll can wait; rounded down the loop would turn until the time has come.
        wait_s = -1.0 if timeout is None else math.ceil(max(timeout, 0.0) * 1e3) * 1e-3
        try:
            polled = self._epoll.poll(wait_s, self._at_most)
            self._began = perf_counter()
            self._was_full = len(polled) == self._at_most
            polled = self._urgent.poll(0) + polled
        except InterruptedError:
            self._began = perf_counter()
            return []
        ready = []
        for fd, mask in polled:
            key = self.keys.get(fd)
            if key is not None:
                # An error or a hang-up is told to whoever waits for anything.
                reads = selectors.EVENT_READ if mask & ~EPOLLOUT else 0
                writes = selectors.EVENT_WRITE if mask & ~EPOLLIN else 0
                ready.append((key, (reads | writes) & key.events))
        return ready

    def close(self) -> None:
        """As BaseSelector."""
        self._epoll.close()
        self._urgent.close()
        self.keys.clear()

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        """As BaseSelector."""
        return _ByFile(self)

    def get_key(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """As BaseSelector."""
        return self.keys[self._lookup(fileobj)]

    def _epoll_of(self, fd: int) -> epoll:
        return self._urgent if fd in self._times.urgent else self._epoll

    def _lookup(self, fileobj: FileDescriptorLike) -> int:
        """Its descriptor, also where the file is closed by now. KeyError when it is not registered."""
        try:
            return _fd(fileobj)
        except ValueError:
            for key in self.keys.values():
                if key.fileobj is fileobj:
                    return key.fd
            raise KeyError(f"{fileobj!r} is not registered") from None


class _ByFile(Mapping["FileDescriptorLike", selectors.SelectorKey]):
    """The selector's keys by file object or descriptor."""

    def __init__(self, selector: TurnSelector) -> None:
        self._selector = selector

    def __len__(self) -> int:
        return len(self._selector.keys)

    def __getitem__(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._selector.get_key(fileobj)

    def __iter__(self) -> Iterator[FileDescriptorLike]:
        return iter(self._selector.keys)


def _fd(fileobj: FileDescriptorLike) -> int:
    """ValueError for a file that is closed, or no descriptor."""
    fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
    if fd < 0:
        raise ValueError(f"{fileobj!r} has no descriptor")
    return fd


def _mask(events: int) -> int:
    if not events or events & ~(selectors.EVENT_READ | selectors.EVENT_WRITE):
        raise ValueError(f"{events} are no events to wait for")
    return (EPOLLIN if events & selectors.EVENT_READ else 0) | (
        EPOLLOUT if events & selectors.EVENT_WRITE else 0
    )
