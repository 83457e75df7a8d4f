"""Whether a connection's other side is still there: watched by the kernel, or probed where it has ended its side.

A client may end its side once it has asked (`shutdown(SHUT_WR)`) and still gets its reply. What it sends is then the
same as what one sends that has left, so who ends its side is probed: only a client that has left answers with RST.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_KEEPALIVE_AFTER_S, _KEEPALIVE_EVERY_S, _NUM_KEEPALIVES = 15, 15, 3
_UNACKNOWLEDGED_S = 60.0
_MAX_MS = (1 << 31) - 1

_LOOK_EVERY_S = 0.1
"""How often it is looked whether a client that sends no more is still there."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Goes before any reply without being one (RFC 9110, 15.2). Once a reply has begun, its own bytes are the probe."""
_NUM_PROBES = 4
"""Several, for a proxy in between that passes on what it hears by its next write. Some clients take no more than 5."""
_TCP_CLOSE = 7
"""State of a Linux socket after RST: the first byte of TCP_INFO."""


def watch_peers(listening: socket.socket, write_timeout_s: float) -> None:
    """Let the kernel find out, for all connections that this socket accepts, that the other side has vanished.

    write_timeout_s: a client may read nothing for so long; for the kernel that is one that acknowledges nothing.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    unacknowledged_ms = min(round(max(_UNACKNOWLEDGED_S, write_timeout_s) * 1e3), _MAX_MS)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_AFTER_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged_ms)


class HalfClosedPeer:
    """Looks after a client that sends no more, until cancelled: one that has left is cut off."""

    def __init__(self, transport: asyncio.Transport, is_silent: Callable[[], bool]) -> None:
        """is_silent: whether a reply is awaited of which no byte is on its way, so that a probe may go before it."""
        self._transport = transport
        self._is_silent = is_silent
        self._num_probes = _NUM_PROBES
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def cancel(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        if self._num_probes and self._is_silent():
            self._num_probes -= 1
            transport.write(_PROBE)
        sock = transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            transport.abort()
        else:
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)
