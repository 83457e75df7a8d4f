"""Accepts connections a few at a time, so that a burst of them does not hold the event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""
_ACCEPTED_AT_ONCE = 8
"""asyncio's own server accepts as many as the kernel holds, and each costs tens of µs."""
_PAUSE_S = 1.0
"""How long nothing is accepted after descriptors or memory have run out."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """A listening socket on the running event loop; it is closed with this object."""

    def __init__(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """sock: bound, and not blocking from here on. protocol: makes one per connection."""
        self._sock = sock
        self._protocol = protocol
        loop = asyncio.get_running_loop()
        assert isinstance(loop, asyncio.SelectorEventLoop)
        self._loop = loop
        self._pause: asyncio.TimerHandle | None = None
        self._is_open = True
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more, but who has connected already: they are told why. Idempotent."""
        if self._is_open:
            self._is_open = False
            if self._pause is None:
                self._accept(BACKLOG)
            self._loop.remove_reader(self._sock.fileno())
            if self._pause is not None:
                self._pause.cancel()
            self._sock.close()

    def _accept(self, at_most: int = _ACCEPTED_AT_ONCE) -> None:
        for _ in range(at_most):
            try:
                connection, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:  # that connection's own fault, says accept(2)
                    log.warning("a connection broke before it was accepted (%s)", error.strerror)
                    continue
                log.error("cannot accept a connection (%s); next attempt in %g s", error.strerror, _PAUSE_S)
                self._loop.remove_reader(self._sock.fileno())
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._connect(connection, address)

    def _connect(self, connection: socket.socket, address: object) -> None:
        """As asyncio's own server does; by `connect_accepted_socket` each would be a task and two futures."""
        connection.setblocking(False)
        try:
            self._loop._make_socket_transport(connection, self._protocol(), extra={"peername": address})  # type: ignore[attr-defined]
        except Exception:
            log.exception("a connection could not be taken over")
            connection.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)
