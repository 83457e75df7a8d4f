"""A client that only counts: token events, when they came, and whether each stream ended as it must.

It is to take a fraction of what the server takes, so it looks at bytes, not at JSON: an event begins with `data: {`, a
text's own quotes being escaped no text can hold a whole event, and only a stream's end is read closely. Times are those
of the reads: events that come in one read have a gap of 0 between them.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

EVENT = b"data: {"
_CHUNK_END = b"\n\n\r\n"
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_READ_AT_ONCE = 64 << 10
_TAIL = 4 << 10
"""Bytes of a stream's end that are kept: its usage is there."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_WAIT_S = 60.0


@dataclass(slots=True)
class Counts:
    """What came. Times in seconds on `time.perf_counter`."""

    num_events: int = 0
    """With a token each, or several."""
    num_tokens: int = 0
    """As the streams' usage says."""
    num_reads: int = 0
    first: array[float] = field(default_factory=lambda: array("d"))
    """From the request to the first event, per stream."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Between events of a stream, after its lead-in."""
    began: float = 0.0
    ended: float = 0.0

    @property
    def wall_s(self) -> float:
        """From the first request to the last stream's end."""
        return self.ended - self.began


class _Stream:
    """One connection and the reply that is on its way."""

    __slots__ = ("is_whole", "last", "num_events", "sent", "sock", "tail")

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_events = 0
        self.tail = b""
        self.is_whole = True
        """Whether what was read ends with a chunk of events."""
        self.sent = self.last = 0.0

    def ask(self, request: bytes) -> None:
        self.num_events, self.tail, self.is_whole, self.last = 0, b"", True, 0.0
        self.sent = time.perf_counter()
        self.sock.sendall(request)


def request_bytes(body: dict[str, Any]) -> bytes:
    """A streamed completion."""
    whole = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **body}
    data = json.dumps(whole).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def make_requests(count: int, num_tokens: int) -> list[bytes]:
    """Prompts of 32 tokens, each its own."""
    return [request_bytes({"prompt": f"{number:032d}", "max_tokens": num_tokens}) for number in range(count)]


def count_streams(
    port: int, requests: Sequence[bytes], num_streams: int, num_tokens: int, *, lead_in: int | None = None
) -> Counts:
    """Send all requests, `num_streams` at a time, and read every reply to its end.

    num_tokens: what each must bring. lead_in: events of each stream after which the times between them are noted; None:
    never. RuntimeError when a stream ends early, without its end mark, or with another number of tokens.
    """
    counts, waiting = Counts(), list(reversed(requests))
    with select.epoll() as poll, ExitStack() as stack:
        streams: dict[int, _Stream] = {}
        for _ in range(min(num_streams, len(requests))):
            stream = _Stream(port)
            stack.enter_context(stream.sock)
            streams[stream.sock.fileno()] = stream
            poll.register(stream.sock.fileno(), select.EPOLLIN)
        counts.began = time.perf_counter()
        for stream in streams.values():
            stream.ask(waiting.pop())
        while streams:
            ready = poll.poll(_WAIT_S)
            if not ready:
                raise RuntimeError(f"nothing came for {_WAIT_S:.0f} s, and {len(streams)} streams are open")
            for fd, _ in ready:
                stream = streams[fd]
                if not _read(stream, counts, num_tokens if lead_in is None else lead_in):
                    continue
                _check_end(stream, counts, num_tokens)
                if waiting:
                    stream.ask(waiting.pop())
                else:
                    poll.unregister(fd)
                    del streams[fd]
        counts.ended = time.perf_counter()
    return counts


def _read(stream: _Stream, counts: Counts, lead_in: int) -> bool:
    """Take what has come; True at the reply's end."""
    data = stream.sock.recv(_READ_AT_ONCE)
    if not data:
        raise RuntimeError(f"the server closed a stream early: …{stream.tail[-200:]!r}")
    has_ended = False
    if stream.is_whole and data[-4:] == _CHUNK_END:  # nearly always
        count, stream.tail = data.count(EVENT), data
    else:
        # An event's beginning may be cut by the end of a read.
        count = (stream.tail[1 - len(EVENT) :] + data).count(EVENT)
        stream.tail = (stream.tail + data)[-_TAIL:]
        stream.is_whole = data[-4:] == _CHUNK_END
        has_ended = stream.tail.endswith(_END)
    counts.num_reads += 1
    num_before = stream.num_events
    stream.num_events = num_before + count
    if not num_before:
        if count:
            counts.first.append(time.perf_counter() - stream.sent)
    elif num_before >= lead_in and count:
        now = time.perf_counter()
        if stream.last:
            counts.gaps.append(now - stream.last)
            if count > 1:
                counts.gaps.extend([0.0] * (count - 1 - has_ended))  # the usage's event has no token
        stream.last = now
    return has_ended


def _check_end(stream: _Stream, counts: Counts, num_tokens: int) -> None:
    usage = _USAGE.findall(stream.tail)
    if not usage or int(usage[-1]) != num_tokens:
        raise RuntimeError(f"a stream of {num_tokens} tokens ended with …{stream.tail[-400:]!r}")
    num_events = stream.num_events - 1  # that of the usage
    if not 0 < num_events <= num_tokens:
        raise RuntimeError(f"a stream of {num_tokens} tokens brought {num_events} events")
    counts.num_events += num_events
    counts.num_tokens += num_tokens
