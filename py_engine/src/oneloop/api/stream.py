"""The connection's side of a streamed reply: headers, events, the end; memory bounded by the socket's buffer.

An event is framed here and handed to the transport in one call. Headers and the end go through aiohttp (`SseWriter`),
or are written with the first and the last events (`PlainWriter`). A client that reads nothing for `write_timeout_s` is
cut off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENT_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_SURELY_TAKEN = 32 << 10
"""Bytes on our side of a socket that nobody waits for: half of a transport's high-water mark."""
_LAST_CHUNK = b"0\r\n\r\n"


class StalledReaderError(ConnectionError):
    """The client has read nothing for too long; its connection is gone now."""


class _EventStream(web.StreamResponse):
    """Headers that leave with the first events: one write, and one packet for the client to wake up for."""

    _send_headers_immediately = False


class EventWriter:
    """A client's socket, for events. Whatever writes raises ConnectionError once the client is gone."""

    __slots__ = ("_chunked", "_protocol", "_started", "_write_timeout_s")

    def __init__(self, protocol: web.RequestHandler, write_timeout_s: float) -> None:
        """write_timeout_s: the client may read nothing for so long."""
        self._protocol = protocol
        self._write_timeout_s = write_timeout_s
        self._started = False
        self._chunked = False

    @property
    def started(self) -> bool:
        """Whether the status is decided."""
        return self._started

    @property
    def is_chunked(self) -> bool:
        """Whether events go as chunks of HTTP/1.1; known once it has started."""
        return self._chunked

    @property
    def socket_fd(self) -> int | None:
        """The socket's descriptor. None while something waits on our side of it, which goes before others' writes."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return None
        sock = transport.get_extra_info("socket")
        return None if sock is None or transport.get_extra_info("sslcontext") is not None else sock.fileno()

    def write(self, events: bytes) -> bool:
        """One write without waiting, after the first. False: wait_writable() before the next one."""
        return self.write_framed(_chunk(events) if self._chunked else events)

    def write_framed(self, data: bytes) -> bool:
        """As write(), for what is framed as it goes on the wire."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(data)
        return not self._protocol.writing_paused

    async def wait_writable(self) -> None:
        """Wait for the reader, as long as it takes anything at all within each `write_timeout_s`."""
        if not self._protocol.writing_paused:
            return
        # One wait for all rounds: aiohttp's would be cancelled for good with the first.
        drained = asyncio.ensure_future(self._protocol._drain_helper())
        try:
            left = self._num_unsent()
            while not (await asyncio.wait([drained], timeout=self._write_timeout_s))[0]:
                before, left = left, self._num_unsent()
                if left >= before:
                    raise self._cut()
            drained.result()
        finally:
            drained.cancel()

    def _is_surely_taken(self, num_bytes: int) -> bool:
        """Whether nobody needs to wait for the reader after so many more bytes."""
        return not self._protocol.writing_paused and self._num_unsent() + num_bytes < _SURELY_TAKEN

    def _num_unsent(self) -> int:
        """Bytes that wait for the reader on our side of the socket."""
        transport = self._protocol.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def _cut(self) -> StalledReaderError:
        if self._protocol.transport is not None:
            self._protocol.transport.abort()
        return StalledReaderError("the client reads nothing")


class SseWriter(EventWriter):
    """Head and end go through aiohttp, which knows every form of connection."""

    __slots__ = ("_request", "_response", "_writer")

    def __init__(self, request: web.Request, headers: Mapping[str, str], write_timeout_s: float) -> None:
        """headers: of the reply, beside those of every stream."""
        super().__init__(request.protocol, write_timeout_s)
        self._request = request
        self._response = _EventStream(headers={**EVENT_HEADERS, **headers})
        self._writer: StreamWriter | None = None

    async def start(self) -> None:
        """Decide the status. The headers leave with the first events."""
        if self._request.version < HttpVersion11:
            # A body without a length or chunks ends with its connection, whatever the client wants to keep alive.
            self._response.force_close()
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        self._started = True
        self._chunked = writer.chunked  # not for a client of HTTP/1.0, whose body ends with the connection

    async def send(self, events: bytes) -> None:
        """One write. Returns at once unless the socket's buffer is above its high-water mark; else when it is not."""
        assert self._writer is not None
        if events:
            await self._writer.write(events, drain=False)
        await self.wait_writable()

    async def end(self, events: bytes) -> web.StreamResponse:
        """The last events and the end of the body."""
        if not self._is_surely_taken(len(events)):
            await self.send(
                events
            )  # for as long as the reader gets on; the end mark of the body then has room
            events = b""
        await self._response.write_eof(events)
        return self._response


class PlainWriter(EventWriter):
    """For HTTP/1.1 with keep-alive: the head goes in front of the first events, in the same write."""

    __slots__ = ("_head",)

    def __init__(self, protocol: web.RequestHandler, head: bytes, write_timeout_s: float) -> None:
        """head: status and headers, with the empty line."""
        super().__init__(protocol, write_timeout_s)
        self._head = head
        self._chunked = True

    def write_framed(self, data: bytes) -> bool:
        """As EventWriter's; the first one decides the status."""
        if not self._started:
            self._started = True
            data, self._head = self._head + data, b""
        return super().write_framed(data)

    def end(self, events: bytes) -> bool:
        """The last events and the end of the body. False: then wait_writable()."""
        taken = self._is_surely_taken(len(events))
        self.write_framed(_chunk(events) + _LAST_CHUNK)
        return taken


def _chunk(data: bytes) -> bytes:
    """A chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(data), data)
