"""What clients see while the model loads: every request gets 503 with Retry-After instead of silence."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

_BODY = b'{"error":{"message":"The model is still loading.","type":"ServiceUnavailableError","param":null,"code":503}}'
_REPLY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_READ_LIMIT = 64 << 10
_READ_TIMEOUT_S = 5.0
_LINGERING_S = 2.0
"""How long the body is thrown away: closed at once, the connection would be reset under a client that still sends."""


@asynccontextmanager
async def answering_while_loading(listening: socket.socket) -> AsyncIterator[None]:
    """Answer on the listening socket, which stays open and is not taken over."""
    asking: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No coroutine: the end of a task that asyncio makes for one is told as an error when it was cancelled.
        task = asyncio.create_task(_refuse(reader, writer))
        asking.add(task)
        task.add_done_callback(asking.discard)

    server = await asyncio.start_server(connected, sock=listening.dup(), limit=_READ_LIMIT)
    try:
        yield
    finally:
        server.close()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request, one refusal, whatever it was."""
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(_REPLY)
        writer.write_eof()
        async with asyncio.timeout(_LINGERING_S):
            while await reader.read(_READ_LIMIT):
                pass
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
        pass  # no request, or a client that is gone: nobody to tell
    finally:
        writer.close()
