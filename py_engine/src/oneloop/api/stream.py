"""The SSE side of a reply: one write per step, memory bounded by the socket's buffer, a clock on stalled readers.

A client that reads slower than the engine finds later chunks larger (the request's stream merges what waits); one that
reads nothing for `write_timeout_s` is cut off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import StreamWriter

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


class StalledReaderError(ConnectionError):
    """The client has read nothing for too long; its connection is gone now."""


class SseWriter:
    """Writes events to one client. Every method raises ConnectionError once the client is gone."""

    __slots__ = ("_request", "_response", "_write_timeout_s", "_writer")

    def __init__(self, request: web.Request, headers: Mapping[str, str], write_timeout_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._write_timeout_s = write_timeout_s
        self._writer: StreamWriter | None = None

    async def start(self) -> None:
        """Send the headers."""
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer

    async def send(self, events: bytes) -> None:
        """One write. Returns at once unless the socket's buffer is above its high-water mark."""
        assert self._writer is not None
        if events:
            await self._writer.write(events, drain=False)
        if self._request.protocol.writing_paused:
            await self._wait_writable(self._writer)

    async def done(self) -> web.StreamResponse:
        """The end mark and the end of the body."""
        await self.send(DONE)
        return await self._end()

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """One error event, then the end of the body; no end mark: a reader must not take the text for whole."""
        await self.send(event(error_body(error)))
        return await self._end()

    async def _end(self) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write_eof()
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
