"""HTTP/1.1 with as little as possible between a socket and the time that is noted: one connection, and a pool of them.

A client library spends most of its time per read on waking a task; here a read is a callback that parses the bytes
where they are. It takes what servers of language models answer with: bodies in chunks, by length, or until the end.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_HEAD_BYTES = 64 << 10
READ_BYTES = 256 << 10
CONNECT_LIMIT_S = 60.0


class Reply(Protocol):
    """Who is told what comes back for one request."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The status line and the headers, names in lower case."""

    def on_body(self, data: bytes, now: float) -> None:
        """A piece of the body, and when it was read (perf_counter)."""

    def on_end(self, now: float, error: str | None) -> None:
        """The body is complete, or will not be: then error says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. path: what stands before /v1/…"""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_url(cls, url: str, *, insecure: bool = False) -> Endpoint:
        """insecure: take any certificate. ValueError for what is no http or https address."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if insecure:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        port = (443 if tls else 80) if parts.port is None else parts.port
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls)

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """A request's head up to the length of its body, which `request` adds. ValueError for what no head can hold."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        for line in lines:
            if not (line.isprintable() and max(line) <= "\xff"):
                raise ValueError(f"{line!r} cannot be part of a request's head: only printable Latin-1 can")
        if " " in path:
            raise ValueError(f"{path!r} is no path: it has a space")
        return "\r\n".join(lines).encode("latin-1")


def request(head: bytes, body: bytes) -> bytes:
    """What goes over the wire."""
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


class Connection(asyncio.BufferedProtocol):
    """One connection: one request at a time, used again while the server keeps it open."""

    def __init__(self, buffer: memoryview) -> None:
        """buffer: where reads go; its content is copied before anything else is read, so many may share it."""
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._take: Callable[[bytes, float], None] = self._take_unasked
        self._rest = b""
        self._missing = 0
        self._keeps = False
        self.is_open = False
        self.was_used = False
        """Whether a request before this one went over it."""
        self.has_answered = False
        """Whether anything came back for the present request."""
        self.was_lost = False
        """Whether it was the server, or the network, that ended it."""

    def send(self, data: bytes, reply: Reply) -> None:
        """Write one request. Its reply is told to `reply`, which is let go of before its on_end is called."""
        assert self._transport is not None
        assert self._reply is None
        self._reply, self._take, self._rest, self.has_answered = reply, self._take_head, b"", False
        self._transport.write(data)

    def abort(self, error: str) -> None:
        """Give the present request up: its reply ends with this error."""
        self._fail(perf_counter(), error)

    def close(self) -> None:
        """Nothing more is sent over it."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def address(self) -> str | None:
        """The server's, as numbers; None where it was gone at once."""
        assert self._transport is not None
        peer: tuple[str, int] | None = self._transport.get_extra_info("peername")
        return peer[0] if peer else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self.is_open = False
        if self._reply is None:
            return
        self.was_lost = True
        now = perf_counter()
        if self._take == self._take_until_close and exc is None:
            self._finish(now)
        else:
            self._fail(
                now, f"the server closed the connection: {exc}" if exc else "the server closed the connection"
            )

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        now = perf_counter()
        data = bytes(self._buffer[:nbytes])
        if self._rest:
            data, self._rest = self._rest + data, b""
        self._take(data, now)

    def eof_received(self) -> bool:
        """The server writes no more: the transport closes itself, connection_lost says the rest."""
        return False

    def _take_unasked(self, data: bytes, now: float) -> None:
        """Bytes between two replies, e.g. a 408 before the server closes: this connection is not used again."""
        self.close()

    def _take_head(self, data: bytes, now: float) -> None:
        self.has_answered = True
        status, rest, headers = 100, data, dict[bytes, bytes]()
        while 100 <= status < 200:  # what only says that the reply is still to come
            head, separator, rest = (data := rest).partition(b"\r\n\r\n")
            if not separator:
                self._rest = data
                if len(data) > MAX_HEAD_BYTES:
                    self._fail(now, f"the reply's head has more than {MAX_HEAD_BYTES} bytes")
                return
            parsed = _parse_head(head)
            if parsed is None:
                self._fail(now, f"no HTTP reply: {head[:80]!r}")
                return
            status, headers, self._keeps = parsed
        self._begin_body(status, headers, rest, now)

    def _begin_body(self, status: int, headers: Mapping[bytes, bytes], rest: bytes, now: float) -> None:
        """The head is read; rest: what came with it."""
        assert self._reply is not None
        coding = headers.get(b"content-encoding", b"identity").lower()
        if coding not in (b"", b"identity"):
            self._fail(
                now, f"the reply is compressed, which was not asked for (Content-Encoding: {coding!r})"
            )
            return
        self._reply.on_head(status, headers)
        length = headers.get(b"content-length", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._take = self._take_chunked
        elif status in (204, 304) or length.isdigit():
            self._take, self._missing = self._take_by_length, int(length) if length.isdigit() else 0
        else:
            self._take, self._keeps = self._take_until_close, False
        if rest or self._take == self._take_by_length:
            self._take(rest, now)

    def _take_chunked(self, data: bytes, now: float) -> None:
        reply, position, num_bytes = self._reply, 0, len(data)
        assert reply is not None
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            digits = data[position:line_end].partition(b";")[0].rstrip()
            try:
                size = int(digits, 16) if digits.isalnum() else -1  # int() takes signs and underscores too
            except ValueError:
                size = -1
            if size < 0:
                self._fail(now, f"no length of a chunk: {data[position:line_end][:40]!r}")
                return
            if size == 0:
                self._rest = data[position:]
                self._end_of_chunks(data, line_end, now)
                return
            end = line_end + 2 + size
            if end + 2 > num_bytes:
                break
            reply.on_body(data[line_end + 2 : end], now)
            if self._reply is not reply:
                return  # the reply was given up
            position = end + 2
        self._rest = data[position:]

    def _end_of_chunks(self, data: bytes, line_end: int, now: float) -> None:
        """The last chunk's line was seen; trailers, of which there are mostly none, end with an empty line."""
        if data.startswith(b"\r\n", line_end + 2):
            self._finish(now, data[line_end + 4 :])
        elif (end := data.find(b"\r\n\r\n", line_end)) >= 0:
            self._finish(now, data[end + 4 :])

    def _take_by_length(self, data: bytes, now: float) -> None:
        body, more = data[: self._missing], data[self._missing :]
        self._missing -= len(body)
        assert self._reply is not None
        if body:
            self._reply.on_body(body, now)
        if not self._missing and self._reply is not None:
            self._finish(now, more)

    def _take_until_close(self, data: bytes, now: float) -> None:
        assert self._reply is not None
        self._reply.on_body(data, now)

    def _finish(self, now: float, more: bytes = b"") -> None:
        reply, self._reply, self._take, self._rest = self._reply, None, self._take_unasked, b""
        self.was_used = True
        if not self._keeps or more:
            self.close()
        assert reply is not None
        reply.on_end(now, None)

    def _fail(self, now: float, error: str) -> None:
        reply, self._reply, self._take, self._rest = self._reply, None, self._take_unasked, b""
        self.close()
        if reply is not None:
            reply.on_end(now, error)


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes], bool] | None:
    """(status, headers, whether the connection stays open), or None for what is no HTTP/1 reply."""
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit():
        return None
    pairs = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    wish = headers.get(b"connection", b"").lower()
    keeps = b"close" not in wish if version == b"HTTP/1.1" else b"keep-alive" in wish
    return int(code), headers, keeps


class Pool:
    """Connections to one endpoint; as many as there are requests at once."""

    def __init__(self, endpoint: Endpoint, limit_s: float = CONNECT_LIMIT_S) -> None:
        """limit_s: how long a connection may take to be made."""
        self._endpoint = endpoint
        self._limit_s = limit_s
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._idle: list[Connection] = []
        self._host = endpoint.host
        """A name until a connection was made: then the address, so that nothing is looked up during a run."""

    async def take(self, *, fresh: bool = False) -> Connection:
        """One that is open: used before, unless `fresh`. OSError, TimeoutError, UnicodeError (of the host's name) when
        none is to be had."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        endpoint = self._endpoint
        async with asyncio.timeout(self._limit_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._buffer),
                self._host,
                endpoint.port,
                ssl=endpoint.tls,
                server_hostname=endpoint.host if endpoint.tls else None,
            )
        self._host = connection.address or self._host
        return connection

    def give(self, connection: Connection) -> None:
        """Back, after its reply has ended."""
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        """All that are idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
