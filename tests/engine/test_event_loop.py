"""The loop whose turns are short: nothing is lost, nobody is passed over, the engine's descriptor comes first."""

import asyncio
import os
import selectors
import socket
import time

import pytest

from oneloop.engine.event_loop import EVENTS_PER_TURN, MAX_EVENTS_PER_TURN, TurnSelector, turn_loop
from oneloop.engine.loop_times import LoopTimes


@pytest.fixture
def times():
    return LoopTimes()


@pytest.fixture
def selector(times):
    with TurnSelector(times) as selector:
        yield selector


@pytest.fixture
def pairs():
    made = [socket.socketpair() for _ in range(3 * EVENTS_PER_TURN)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


def test_a_few_per_turn_and_each_in_its_turn(selector, pairs):
    for ours, theirs in pairs:
        selector.register(ours, selectors.EVENT_READ, ours.fileno())
        theirs.send(b"x")
    seen = []
    for _ in range(3):
        ready = selector.select(0)
        assert len(ready) == EVENTS_PER_TURN
        assert {events for _, events in ready} == {selectors.EVENT_READ}
        seen += [key.data for key, _ in ready]
        time.sleep(0.002)  # what they set off
    assert sorted(seen) == sorted(ours.fileno() for ours, _ in pairs), "none twice before each had its turn"


def test_more_per_turn_while_turns_are_short(selector, pairs):
    for ours, theirs in pairs:
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(b"x")
    counts = [len(selector.select(0)) for _ in range(6)]
    assert counts[0] == EVENTS_PER_TURN
    assert EVENTS_PER_TURN < max(counts) <= MAX_EVENTS_PER_TURN
    for _ in range(3):
        time.sleep(0.002)
        count = len(selector.select(0))
    assert count == EVENTS_PER_TURN


def test_a_burst_after_quiet_begins_with_a_few(selector, pairs):
    """Short turns that bring nothing tell nothing about those that bring much."""
    for _ in range(10):
        assert selector.select(0) == []
    for ours, theirs in pairs:
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(b"x")
    assert len(selector.select(0)) == EVENTS_PER_TURN


def test_after_any_long_turn_there_are_fewer(selector, pairs):
    for ours, theirs in pairs:
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(b"x")
    assert max(len(selector.select(0)) for _ in range(6)) > EVENTS_PER_TURN
    for ours, _ in pairs[1:]:
        ours.recv(1)
    while len(selector.select(0)) > 1:
        """Until one turn brings what is left."""
    time.sleep(0.002)
    for _, theirs in pairs[1:]:
        theirs.send(b"x")
    assert len(selector.select(0)) == EVENTS_PER_TURN


def test_what_is_urgent_comes_in_every_turn_and_first(selector, times, pairs):
    fd = os.eventfd(1)
    times.urgent.add(fd)
    try:
        for ours, theirs in pairs:
            selector.register(ours, selectors.EVENT_READ)
            theirs.send(b"x")
        selector.register(fd, selectors.EVENT_READ)
        for _ in range(5):
            assert selector.select(0)[0][0].fd == fd
        selector.unregister(fd)
        assert fd not in {key.fd for _ in range(5) for key, _ in selector.select(0)}
    finally:
        os.close(fd)


def test_what_is_urgent_ends_the_wait(selector, times):
    fd = os.eventfd(0)
    times.urgent.add(fd)
    try:
        selector.register(fd, selectors.EVENT_READ)
        assert selector.select(0.01) == []
        os.eventfd_write(fd, 1)
        ((key, events),) = selector.select(10)
        assert (key.fd, events) == (fd, selectors.EVENT_READ)
    finally:
        os.close(fd)


def test_registering(selector, pairs):
    (ours, theirs), *_ = pairs
    key = selector.register(ours, selectors.EVENT_READ, "data")
    with pytest.raises(KeyError):
        selector.register(ours.fileno(), selectors.EVENT_READ)
    with pytest.raises(ValueError, match="no events"):
        selector.register(theirs, 0)
    assert selector.get_key(ours) == selector.get_map()[ours.fileno()] == selector.get_map()[ours] == key
    assert list(selector.get_map()) == [ours.fileno()]
    assert selector.get_map().get(theirs.fileno()) is None
    assert selector.select(0) == []
    changed = selector.modify(ours, selectors.EVENT_READ | selectors.EVENT_WRITE, "more")
    assert selector.select(0) == [(changed, selectors.EVENT_WRITE)]
    theirs.close()
    ((_, events),) = selector.select(0)
    assert events == selectors.EVENT_READ | selectors.EVENT_WRITE, "a hang-up is told to both"
    ours.close()
    assert selector.unregister(ours).data == "more", "also when it is closed already"
    assert len(selector.get_map()) == 0
    with pytest.raises(KeyError):
        selector.unregister(ours)


def test_an_echo_server_on_it(times):
    """asyncio as a whole: a burst of connections, timers, threads, a subprocess's end."""

    num_handled = 0

    async def handle(reader, writer):
        nonlocal num_handled
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        num_handled += 1

    async def one(port, number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"%d\n" % number)
            assert await reader.readline() == b"%d\n" % number
            await asyncio.sleep(0.001)
        writer.close()
        await writer.wait_closed()
        return number

    async def main():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            found = await asyncio.gather(*(one(port, number) for number in range(40)))
            while num_handled < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert await asyncio.to_thread(lambda: 7) == 7
        return found

    with asyncio.Runner(loop_factory=turn_loop(times)) as runner:
        assert runner.run(main()) == list(range(40))
    assert times.turns.count > 40
    assert times.turns.total > 0


def test_pauses_of_the_collector_are_counted(times):
    import gc

    with times.watching_gc():
        gc.collect()
    count = times.gc_pauses.count
    gc.collect()
    assert times.gc_pauses.count == count >= 1
    assert 0 < times.gc_longest_s <= times.gc_pauses.total
