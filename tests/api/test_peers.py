"""What the kernel is asked to watch, as connections have it: they take it over from the listening socket."""

from __future__ import annotations

import socket

import pytest

from oneloop.api.peers import watch_peers


@pytest.mark.parametrize(
    ("write_timeout_s", "unacknowledged_ms"), [(0.5, 60_000), (90.0, 90_000), (1e9, (1 << 31) - 1)]
)
def test_who_vanishes_is_found_out(write_timeout_s: float, unacknowledged_ms: int) -> None:
    """Silence is probed for; what is sent has to be acknowledged, for as long as a reader may be slow."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch_peers(listening, write_timeout_s)
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            found = [connection.getsockopt(socket.IPPROTO_TCP, name) for name in names]
            assert found == [15, 15, 3, unacknowledged_ms]


def test_a_socket_of_this_machine_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        watch_peers(listening, 60.0)
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
