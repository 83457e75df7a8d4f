"""How streamed replies share the loop: slices, turns, slow readers and back, failures that stay with their reply."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.api.chunks import ChunkEncoder
from oneloop.api.connection import Connection
from oneloop.api.outbox import SLICE_S, Outbox
from oneloop.api.stream import SseWriter
from oneloop.engine.loop_times import LoopTimes

if TYPE_CHECKING:
    from collections.abc import Callable

COMPLETIONS = "/v1/completions"


LANES = {"express": "application/json", "aiohttp": "Application/JSON"}
"""Forms of the media type: the usual one, and one that is not looked for on the express lane."""


def message(body: Any, version: str = "1.1", lane: str = "express") -> bytes:
    data = json.dumps({"stream": True, "ignore_eos": True, **body}).encode()
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: x\r\nContent-Type: {LANES[lane]}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def delta(text: str, finish_reason: str | None = None) -> SimpleNamespace:
    """As oneloop_core.Delta, one token."""
    return SimpleNamespace(
        index=0, text=text, token_ids=[65], finish_reason=finish_reason, stop_reason=None, error=None,
        is_request_at_fault=False,
        logprobs=None, queue_s=None, num_cached_tokens=0, prompt_logprobs=None, pooled=None, cumulative_logprob=None,
    )  # fmt: skip


async def until(condition: Callable[[], Any], limit_s: float = 5) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def open_held(
    server: Any, body: Any, lane: str = "express"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
    """A streamed request whose deltas the test pushes itself: (reader, writer, its RequestStream)."""
    server.engine.paused.clear()
    known = set(server.engine.live)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message(body, lane=lane))
    await until(lambda: set(server.engine.live) - known)
    (handle,) = set(server.engine.live) - known
    return reader, writer, server.engine.live[handle]


class Recorder:
    """A sender that takes its time."""

    def __init__(self, log: list[Any], name: int, cost_s: float = 0.0) -> None:
        self.log, self.name, self.cost_s = log, name, cost_s

    def send_news(self) -> None:
        self.log.append(self.name)
        end = time.perf_counter() + self.cost_s
        while time.perf_counter() < end:
            pass


async def test_slices_leave_the_loop_to_others() -> None:
    """Everything is sent, in order; the loop turns in between."""
    outbox, log = Outbox(LoopTimes()), []
    for name in range(100):
        outbox.post(Recorder(log, name, SLICE_S / 4))
    turns = 0
    while len(log) < 100:
        await asyncio.sleep(0)
        turns += 1
    assert log == list(range(100))
    assert turns >= 10
    outbox.post(Recorder(log, 100))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log[-1] == 100


@pytest.mark.parametrize("lane", LANES)
async def test_a_step_is_one_chunk_and_wakes_no_task(
    server: Any, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its start and its end a reply is written without its task."""
    sends = []
    original = SseWriter.send

    async def send(self: SseWriter, events: bytes) -> None:
        sends.append(events)
        await original(self, events)

    monkeypatch.setattr(SseWriter, "send", send)
    reader, writer, stream = await open_held(server, {"prompt": "a", "max_tokens": 100}, lane)
    for number in range(50):
        stream.push(delta(f"<{number}>"), 0.0)
        received = await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5)
        assert received.count(b"data: ") == 1
        assert b"<%d>" % number in received
    assert len(sends) == (1 if lane == "aiohttp" else 0)
    stream.push(delta("end", "stop"), 0.0)
    received = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(sends) == (1 if lane == "aiohttp" else 0), "the end is one write with its events"
    server.engine.paused.set()
    writer.write(message({"prompt": "b", "max_tokens": 3}, lane=lane))  # the connection goes on
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
    writer.close()


@pytest.mark.parametrize("lane", LANES)
async def test_slow_and_back(server: Any, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the socket is full nothing is taken; once it is not, the merged rest goes out, then step by step again."""
    original = Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    reader, writer, stream = await open_held(server, {"prompt": "a", "max_tokens": 100}, lane)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sent = ["start"]
    stream.push(delta("start"), 0.0)
    received = await reader.readuntil(b"\n\n\r\n")
    writer.transport.pause_reading()
    while not stream._pending:  # until the server takes no more
        sent.append(f"<{len(sent)}>" + "x" * 20_000)
        stream.push(delta(sent[-1]), 0.0)
        await asyncio.sleep(0.005)
        assert len(sent) < 300
    for _ in range(20):
        sent.append("merged")
        stream.push(delta("merged"), 0.0)
    await asyncio.sleep(0.01)
    assert stream._pending[0].text.endswith("merged" * 20)
    writer.transport.resume_reading()
    while not received.endswith(b"merged" + b'","finish_reason":null}]}\n\n\r\n'):
        received += await asyncio.wait_for(reader.read(1 << 16), 5)
    for number in range(5):
        sent.append(f"again{number}")
        stream.push(delta(sent[-1]), 0.0)
        one = await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5)
        assert one.count(b"data: ") == 1
        received += one
    sent.append("!")
    stream.push(delta("!", "length"), 0.0)
    received += await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
    assert texts(body_of(received)) == "".join(sent)
    writer.close()


@pytest.mark.parametrize("lane", LANES)
async def test_who_does_not_read_the_end_is_cut(
    serve: Any, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written, but not taken: the connection would stay for as long as its reader does."""
    connections: list[Connection] = []
    original = Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connections.append(self)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with serve(write_timeout_s=0.3) as server:
        reader, writer, stream = await open_held(server, {"prompt": "a", "max_tokens": 100}, lane)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.push(delta("start"), 0.0)
        await reader.readuntil(b"\n\n\r\n")
        writer.transport.pause_reading()
        stream.push(delta("x" * 5_000_000, "length"), 0.0)
        await asyncio.sleep(0.1)
        (connection,) = connections
        assert connection.transport is not None
        await until(lambda: connection.transport is None, 2)
        writer.close()


def body_of(received: bytes) -> bytes:
    """The body of a chunked reply; every chunk must be whole."""
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, end, rest = body + rest[:length], rest[length : length + 2], rest[length + 2 :]
        assert end == b"\r\n"
        if length == 0:
            assert rest == b""
            return body


def texts(body: bytes) -> str:
    """The text of all chunks; the end mark must be the last event."""
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"], ids=["close", "keep-alive"])
async def test_http_1_0_has_no_chunks(server: Any, keep_alive: bytes) -> None:
    """The body is the events, and ends with the connection, also where the client would like to keep that."""
    request = message({"prompt": "a", "max_tokens": 20, "seed": 1}, "1.0")
    received = await server.raw(request.replace(b"\r\n", b"\r\n" + keep_alive, 1))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    _, whole = await server.post(
        COMPLETIONS, {"prompt": "a", "max_tokens": 20, "seed": 1, "ignore_eos": True}
    )
    assert texts(body) == whole["choices"][0]["text"]


@pytest.mark.parametrize("lane", LANES)
async def test_an_error_in_one_reply_is_its_own(
    server: Any, lane: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug met while a chunk is encoded ends that stream with an error event; the others go on."""
    original = ChunkEncoder.encode

    def encode(self: ChunkEncoder, choice: int, found: Any) -> bytes:
        if "poison" in found.text:
            raise ZeroDivisionError("a bug")
        return original(self, choice, found)

    monkeypatch.setattr(ChunkEncoder, "encode", encode)
    held = [await open_held(server, {"prompt": "a", "max_tokens": 100}, lane) for _ in range(3)]
    for _, _, stream in held:
        stream.push(delta("first"), 0.0)
    for reader, _, _ in held:
        assert b"first" in await reader.readuntil(b"\n\n\r\n")
    with caplog.at_level(logging.ERROR):
        for number, (_, _, stream) in enumerate(held):
            stream.push(delta("poison" if number == 1 else "second"), 0.0)
        ended = await asyncio.wait_for(held[1][0].readuntil(b"\r\n0\r\n\r\n"), 5)
    assert b'"type":"InternalServerError"' in ended
    assert b"ZeroDivisionError" not in ended
    assert b"[DONE]" not in ended
    assert "was streamed" in caplog.text
    assert held[1][2].finish_reason == "abort"
    for number in (0, 2):
        reader, writer, stream = held[number]
        stream.push(delta("third", "stop"), 0.0)
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
        assert b"third" in rest
        assert b"[DONE]" in rest
        writer.close()
    held[1][1].close()


async def test_a_bug_before_the_first_chunk_is_a_status(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: ChunkEncoder, choice: int, found: Any) -> bytes:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ChunkEncoder, "encode", encode)
    status, answer = await server.post(COMPLETIONS, {"prompt": "a", "stream": True})
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    await server.settled()


@pytest.mark.parametrize("lane", LANES)
async def test_the_engine_aborts_under_way(server: Any, lane: str) -> None:
    """While the outbox writes: the reply ends in order, with the reason."""
    reader, writer, stream = await open_held(server, {"prompt": "a", "max_tokens": 100, "n": 1}, lane)
    stream.push(delta("one"), 0.0)
    received = await reader.readuntil(b"\n\n\r\n")
    stream.push(delta("two"), 0.0)
    stream.abort()
    received += await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
    assert b'"finish_reason":"abort"' in received
    assert texts(body_of(received)) == "onetwo"
    writer.close()


@pytest.mark.parametrize("lane", LANES)
async def test_several_prompts_make_one_chunk_per_step(server: Any, lane: str) -> None:
    """Choices of several requests of the engine, in the order of their numbers, in one write."""
    server.engine.paused.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message({"prompt": ["a", "b", "c"], "max_tokens": 100}, lane=lane))
    await until(lambda: len(server.engine.live) == 3)
    streams = list(server.engine.live.values())
    await asyncio.sleep(0.01)
    for _ in range(4):
        for number in (2, 0, 1):
            streams[number].push(delta(f"s{number}"), 0.0)
        received = await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5)
        events = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "s0"), (1, "s1"), (2, "s2")]
    writer.close()
    streams[0].push(delta("for nobody"), 0.0)  # what tells that it has left, and does not only send no more
    await server.settled()


@pytest.mark.parametrize("lane", LANES)
async def test_who_reads_the_end_slowly_gets_all(
    serve: Any, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the write timeout in all, but never that long without taking anything."""
    original = Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with serve(write_timeout_s=0.6) as server:
        reader, writer, stream = await open_held(server, {"prompt": "a", "max_tokens": 100}, lane)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        stream.push(delta("start"), 0.0)
        await reader.readuntil(b"\n\n\r\n")
        stream.push(delta("x" * 5_000_000, "length"), 0.0)
        received = b""
        for _ in range(12):
            await asyncio.sleep(0.1)
            received += await reader.read(100_000)
        assert len(received) < 5_000_000, "nothing was slow about it"
        async with asyncio.timeout(10):
            while not received.endswith(b"\r\n0\r\n\r\n"):
                part = await reader.read(1 << 20)
                assert part, "cut while it was read"
                received += part
        writer.close()


@pytest.mark.parametrize("lane", LANES)
async def test_events_do_not_wait_for_acknowledgements(
    serve: Any, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP_NODELAY: with it unset, an event that follows another closely comes 40 ms late."""
    found: list[int] = []
    original = Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        original(self, transport)
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with serve() as server:
        _, writer, _ = await open_held(server, {"prompt": "a", "max_tokens": 1}, lane)
        assert found == [1]
        writer.close()
