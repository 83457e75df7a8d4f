"""Accepting connections: in small portions, on after exhaustion, orderly at the end."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from typing import Any

import pytest

from oneloop.api import listener as listener_module
from oneloop.api.listener import Listener


class Counter(asyncio.Protocol):
    """Counts the connections that were made."""

    made: list[asyncio.BaseTransport]

    def __init__(self, made: list[Any]) -> None:
        self.made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(transport)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_burst_is_accepted_over_several_turns() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    made: list[Any] = []
    clients = [socket.create_connection(sock.getsockname()) for _ in range(30)]
    listener = Listener(sock, lambda: Counter(made))
    counts = []
    while len(made) < 30:
        await asyncio.sleep(0)
        counts.append(len(made))
    assert max(b - a for a, b in itertools.pairwise(counts)) <= 8
    listener.close()
    listener.close()
    assert sock.fileno() == -1
    for transport in made:
        transport.close()
    for client in clients:
        client.close()
    await asyncio.sleep(0.01)


class Exhausted:
    """A socket whose accept() fails for a while."""

    def __init__(self, sock: socket.socket, error: int) -> None:
        self._sock, self._error, self.num_failed = sock, error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> Any:
        if self.num_failed < 2:
            self.num_failed += 1
            raise OSError(self._error, "no more")
        return self._sock.accept()


async def test_it_goes_on_after_descriptors_ran_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "_PAUSE_S", 0.02)
    sock = Exhausted(socket.create_server(("127.0.0.1", 0)), errno.EMFILE)
    made: list[Any] = []
    listener = Listener(sock, lambda: Counter(made))  # type: ignore[arg-type]
    client = socket.create_connection(sock.getsockname())
    await until(lambda: made)
    assert sock.num_failed == 2
    assert caplog.text.count("cannot accept") == 2
    listener.close()
    made[0].close()
    client.close()
    await asyncio.sleep(0.01)


async def test_one_broken_connection_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Neither while it accepts nor at the end."""
    sock = Exhausted(socket.create_server(("127.0.0.1", 0)), errno.EPROTO)
    made: list[Any] = []
    listener = Listener(sock, lambda: Counter(made))  # type: ignore[arg-type]
    client = socket.create_connection(sock.getsockname())
    await until(lambda: made)
    assert caplog.text.count("before it was accepted") == 2
    sock.num_failed = 0
    listener.close()
    assert (sock.num_failed, sock.fileno()) == (2, -1)
    made[0].close()
    client.close()
    await asyncio.sleep(0.01)


async def test_closed_while_it_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "_PAUSE_S", 0.02)
    sock = Exhausted(socket.create_server(("127.0.0.1", 0)), errno.EMFILE)
    listener = Listener(sock, lambda: Counter([]))  # type: ignore[arg-type]
    client = socket.create_connection(sock.getsockname())
    await until(lambda: sock.num_failed)
    listener.close()
    client.close()
    await asyncio.sleep(0.05)
    assert sock.num_failed == 1
    assert "asyncio" not in {record.name for record in caplog.records}, "its timer has ended with it"


async def test_a_connection_that_nobody_can_take_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []
    kept: list[socket.socket] = []

    class Listening(socket.socket):
        def accept(self) -> Any:
            connection, address = super().accept()
            kept.append(connection)  # so that no collection closes it
            return connection, address

    def protocol() -> Counter:
        if len(kept) == 1:
            raise MemoryError
        return Counter(made)

    sock = Listening(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    clients = [socket.create_connection(sock.getsockname()) for _ in range(2)]
    listener = Listener(sock, protocol)
    await until(lambda: made)
    assert "could not be taken over" in caplog.text
    assert kept[0].fileno() == -1
    listener.close()
    made[0].close()
    for client in clients:
        client.close()
    await asyncio.sleep(0.01)


async def test_who_has_connected_when_it_closes_is_not_cut() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    made: list[Any] = []
    listener = Listener(sock, lambda: Counter(made))
    clients = [socket.create_connection(sock.getsockname()) for _ in range(20)]
    listener.close()
    await until(lambda: len(made) == 20)
    for transport in made:
        transport.close()
    for client in clients:
        client.close()
    await asyncio.sleep(0.01)
