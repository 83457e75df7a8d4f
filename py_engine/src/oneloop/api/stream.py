"""The connection's side of a streamed reply: headers, events, the end; memory bounded by the socket's buffer.

Headers and the end go through aiohttp; in between an event is framed here and handed to the transport in one call. A
client that reads nothing for `write_timeout_s` is cut off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

from oneloop.api.chunks import DONE, event
from oneloop.api.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.errors import ApiError

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


_SURELY_TAKEN = 32 << 10
"""Bytes on our side of a socket that nobody waits for: half of a transport's high-water mark."""


class StalledReaderError(ConnectionError):
    """The client has read nothing for too long; its connection is gone now."""


class _EventStream(web.StreamResponse):
    """Headers that leave with the first events: one write, and one packet for the client to wake up for."""

    _send_headers_immediately = False


class SseWriter:
    """Writes events to one client. Every method raises ConnectionError once the client is gone."""

    __slots__ = ("_chunked", "_protocol", "_request", "_response", "_write_timeout_s", "_writer")

    def __init__(self, request: web.Request, headers: Mapping[str, str], write_timeout_s: float) -> None:
        self._request = request
        self._protocol = request.protocol
        self._response = _EventStream(headers={**_HEADERS, **headers})
        self._write_timeout_s = write_timeout_s
        self._writer: StreamWriter | None = None
        self._chunked = False

    @property
    def started(self) -> bool:
        """Whether the status is decided."""
        return self._writer is not None

    async def start(self) -> None:
        """Decide the status. The headers leave with the first events."""
        if self._request.version < HttpVersion11:
            # A body without a length or chunks ends with its connection, whatever the client wants to keep alive.
            self._response.force_close()
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        self._chunked = writer.chunked  # not for a client of HTTP/1.0, whose body ends with the connection

    async def send(self, events: bytes) -> None:
        """One write. Returns at once unless the socket's buffer is above its high-water mark; else when it is not."""
        assert self._writer is not None
        if events:
            await self._writer.write(events, drain=False)
        if self._protocol.writing_paused:
            await self._wait_writable(self._writer)

    def write(self, events: bytes) -> bool:
        """One write without waiting, after the first send(). False: `await send(b"")` before the next one."""
        return self.write_framed(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    @property
    def socket_fd(self) -> int | None:
        """The socket's descriptor. None while something waits on our side of it, which goes before others' writes."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return None
        sock = transport.get_extra_info("socket")
        return None if sock is None or transport.get_extra_info("sslcontext") is not None else sock.fileno()

    @property
    def is_chunked(self) -> bool:
        """Whether events go as chunks of HTTP/1.1; known once it has started."""
        return self._chunked

    def write_framed(self, data: bytes) -> bool:
        """As write(), for what is framed as it goes on the wire."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(data)
        return not self._protocol.writing_paused

    async def done(self, events: bytes) -> web.StreamResponse:
        """The last events, the end mark and the end of the body."""
        return await self._end(events + DONE)

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """One error event, then the end of the body; no end mark: a reader must not take the text for whole."""
        return await self._end(event(error_body(error)))

    async def _end(self, events: bytes) -> web.StreamResponse:
        if not self._protocol.writing_paused and self._num_unsent() + len(events) < _SURELY_TAKEN:
            await self._response.write_eof(events)  # one write, and one of its end
            return self._response
        await self.send(b"")
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write_eof(events)
        except TimeoutError:
            raise self._cut() from None
        return self._response

    async def _wait_writable(self, writer: StreamWriter) -> None:
        """Wait for the reader, as long as it takes anything at all within each `write_timeout_s`."""
        left = self._num_unsent()
        while True:
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await writer.drain()
                return
            except TimeoutError:
                before, left = left, self._num_unsent()
                if left >= before:
                    raise self._cut() from None

    def _num_unsent(self) -> int:
        """Bytes that wait for the reader on our side of the socket."""
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def _cut(self) -> StalledReaderError:
        if self._request.transport is not None:
            self._request.transport.abort()
        return StalledReaderError("the client reads nothing")
