"""Clients that vanish, stall or read slowly (B-04, B-05, B-07, B-08 in small): nothing of theirs stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.api.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def message(body: Any, path: str = COMPLETIONS) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def delta(text: str, token_ids: list[int], finish_reason: str | None = None) -> SimpleNamespace:
    """As oneloop_core.Delta."""
    return SimpleNamespace(
        index=0, text=text, token_ids=token_ids, finish_reason=finish_reason, stop_reason=None, error=None,
        is_request_at_fault=False,
        logprobs=None, queue_s=None, num_cached_tokens=0, prompt_logprobs=None, pooled=None, cumulative_logprob=None,
    )  # fmt: skip


async def until(condition: Callable[[], Any], limit_s: float = 5) -> None:
    """Wait for it."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_reset", [True, False])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_leaving_ends_the_request(server: Any, stream: bool, with_reset: bool, prompt: Any) -> None:
    server.engine.step_s = 0.005
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message({"prompt": prompt, "max_tokens": 250, "ignore_eos": True, "n": 2, "stream": stream}))
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.05)
    assert len(server.engine.live) == (3 if isinstance(prompt, list) else 1)
    if with_reset:
        reset(writer)
    else:
        writer.close()
    async with asyncio.timeout(1):
        while server.engine.live:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert server.engine.metrics.request_success["abort"] > 0
    metrics = (await server.get("/metrics"))[1]
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 0.0' in metrics
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0' in metrics


ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 200}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 200}}),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda value: str(value)[:24])
async def test_leaving_ends_it_on_every_route(
    server: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    """At once: not when all that was asked for has been generated."""
    server.engine.step_s = 0.02
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message({**body, "ignore_eos": True, "stream": stream}, path))
    if stream:
        await reader.readuntil(b"data: ")
    await until(lambda: server.engine.live)
    writer.close()
    await until(lambda: not server.engine.live, 2)
    assert server.engine.metrics.request_success["abort"] == 1


async def test_leaving_before_the_first_token(server: Any) -> None:
    server.engine.paused.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message({"prompt": "a", "max_tokens": 250, "stream": True}))
    await asyncio.sleep(0.05)
    assert len(server.engine.live) == 1
    writer.close()
    await server.settled()
    assert await reader.read() == b""


async def test_abort_storm(server: Any) -> None:
    """Requests cut at random points, by FIN and by RST, streamed and not: all accounted for, nothing left."""
    engine, source = server.engine, random.Random(4)
    engine.step_s = 0.0005
    body = {"prompt": "canary", "max_tokens": 24, "seed": 1}
    before = (await server.post(COMPLETIONS, body))[1]["choices"]
    await asyncio.sleep(0.1)
    num_files, num_tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        request = message(
            {"prompt": f"p{number}", "max_tokens": 60, "n": number % 3 + 1, "stream": number % 2 == 0}
        )
        cut = source.random()
        if cut < 0.1:
            writer.write(request[: source.randrange(len(request))])
        else:
            writer.write(request)
            await asyncio.sleep(source.random() * 0.05)
            if cut > 0.8:
                await reader.read(source.randrange(1, 3000))
        if source.random() < 0.5:
            reset(writer)
        else:
            writer.close()

    for first in range(0, 600, 100):
        await asyncio.gather(*[one(number) for number in range(first, first + 100)])
    await server.settled()
    await asyncio.sleep(0.2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_files + 2
    assert len(asyncio.all_tasks()) <= num_tasks + 2
    ended = engine.metrics.request_success
    assert sum(ended.values()) == len(engine.submitted)
    assert ended["abort"] > 50
    assert engine.metrics.request_generation_tokens.count == len(engine.submitted)
    assert (await server.post(COMPLETIONS, body))[1]["choices"] == before


def slow_socket(port: int) -> socket.socket:
    """A connection that takes little in before it makes the sender wait."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    return sock


async def connect_slowly(server: Any, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = slow_socket(server.port)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    writer.write(message(body))
    return reader, writer


LONG = {"max_tokens": 40_000, "ignore_eos": True, "stream": True, "n": 8}


def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink what the kernel takes off the server's hands, so that a test need not fill megabytes."""
    from oneloop.api.connection import Connection

    original = Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)


async def test_a_stalled_reader_is_cut(
    serve: Any, null_engine_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads one event and stops: cut after the set time, its request ended, its memory bounded, others unharmed."""
    small_send_buffers(monkeypatch)
    engine = null_engine_type(max_model_len=50_000, num_blocks=1 << 16)
    async with serve(engine, write_timeout_s=0.5) as server:
        stalled = [await connect_slowly(server, {"prompt": f"s{i}", **LONG}) for i in range(4)]
        for reader, _ in stalled:
            await reader.readuntil(b"data: ")
        other = await server.stream(COMPLETIONS, {"prompt": "o", "max_tokens": 50})
        assert other[-1] == "[DONE]"
        await asyncio.sleep(0.2)
        assert len(engine.live) == 4
        waiting = [sum(len(d.text) for d in s._pending.values()) for s in engine.live.values()]
        assert min(waiting) > 0, "the server has stopped taking deltas"
        async with asyncio.timeout(5):
            while engine.live:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert engine.metrics.request_success["abort"] == 4
        for _, writer in stalled:
            writer.close()


async def test_a_slow_reader_gets_everything(
    serve: Any, null_engine_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a little at a time, with pauses below the limit: every token arrives, in order."""
    small_send_buffers(monkeypatch)
    async with serve(
        null_engine_type(max_model_len=50_000, num_blocks=1 << 16), write_timeout_s=0.5
    ) as server:
        body = {"prompt": "s", "max_tokens": 3_000, "ignore_eos": True, "seed": 1}
        _, whole = await server.post(COMPLETIONS, body)
        reader, writer = await connect_slowly(server, {**body, "stream": True})
        received = b""
        while b"[DONE]" not in received:
            received += await asyncio.wait_for(reader.read(8192), 5)
            await asyncio.sleep(0.003)
        writer.close()
        events = [line[6:] for line in received.decode().splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
        assert text == whole["choices"][0]["text"]


async def test_the_kernel_waits_for_a_reader_as_long_as_we_do(
    serve: Any, null_engine_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux counts a window that stays closed as data that nobody acknowledges."""
    small_send_buffers(monkeypatch)
    monkeypatch.setattr("oneloop.api.peers._UNACKNOWLEDGED_S", 0.2)
    async with serve(
        null_engine_type(max_model_len=50_000, num_blocks=1 << 16), write_timeout_s=20.0
    ) as server:
        reader, writer = await connect_slowly(
            server, {"prompt": "s", "max_tokens": 3_000, "ignore_eos": True, "stream": True}
        )
        await asyncio.sleep(2)  # the reader takes 1,024 bytes by itself
        received = b""
        while piece := await asyncio.wait_for(reader.read(8192), 5):
            received += piece
            if b"[DONE]" in received:
                break
        assert b"[DONE]" in received
        writer.close()


async def test_steps_that_wait_are_merged(server: Any) -> None:
    """What comes before a reply's turn to send goes out as one chunk, not one per token."""
    engine = server.engine
    engine.paused.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message({"prompt": "s", "max_tokens": 100, "ignore_eos": True, "stream": True}))
    await until(lambda: engine.live)
    stream = next(iter(engine.live.values()))
    for round in range(3):
        for token in range(10):
            stream.push(delta(f"{round}", [token]), 0.0)
        received = await asyncio.wait_for(reader.readuntil(b"\n\n\r\n"), 5)
        assert (received.count(b"data: {"), received.count(b"%d" % round * 10)) == (1, 1)
    writer.close()


async def end_sending(server: Any, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send, and shut the sending side down: no more is to come, but the reply is waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    writer.write_eof()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step_s", [0.0, 0.02])
async def test_who_only_sends_no_more_is_answered(server: Any, stream: bool, step_s: float) -> None:
    """Also where the answer takes longer than it takes to look for those that have left; every request is answered."""
    server.engine.step_s = step_s
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": stream}
    reader, writer = await end_sending(server, message(body) * 3)
    received = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert received.count(b'"finish_reason":"length"') == 3
    assert received.count(b"data: [DONE]") == 3 * stream
    for interim in received.split(b"HTTP/1.1 100 Continue")[1:]:
        assert interim == b"\r\n\r\n" or interim.startswith(b"\r\n\r\nHTTP/1.1 200"), (
            "only in front of a reply"
        )
    assert server.engine.metrics.request_success["length"] == 3
    assert server.engine.metrics.request_success["abort"] == 0


def kept_connections() -> int:
    """Those that are still in memory. Looks at every object there is, asking none for its class."""
    return sum(type(kept) is Connection for kept in gc.get_objects())


@pytest.mark.parametrize("stream", [True, False])
async def test_who_only_sends_no_more_leaves_nothing_to_the_collector(server: Any, stream: bool) -> None:
    """Full collections are rare on a server, and a connection has buffers."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            reader, writer = await end_sending(
                server, message({"prompt": "a", "max_tokens": 1, "stream": stream})
            )
            assert b" 200 OK" in await reader.read()
            writer.close()
        async with asyncio.timeout(5):
            while await asyncio.to_thread(kept_connections):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


@pytest.mark.parametrize("part", ["nothing", "head", "body", "second"])
async def test_who_has_not_asked_for_anything_whole_is_closed(server: Any, part: str) -> None:
    server.engine.paused.clear()
    whole = message({"prompt": "a", "max_tokens": 20})
    data = {"nothing": b"", "head": whole[:30], "body": whole[:-3], "second": whole + whole[:-3]}[part]
    reader, writer = await end_sending(server, data)
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()
    await server.settled()


async def test_a_client_of_http_1_0_that_sends_no_more_has_left(server: Any) -> None:
    server.engine.paused.clear()
    data = message({"prompt": "a", "max_tokens": 20}).replace(b"HTTP/1.1", b"HTTP/1.0")
    reader, writer = await end_sending(server, data)
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()
    await server.settled()


async def test_leaving_after_the_end_of_sending(server: Any) -> None:
    """First only the sending side is ended, then all of it, while no token comes."""
    server.engine.paused.clear()
    _, writer = await end_sending(server, message({"prompt": "a", "max_tokens": 20}))
    await asyncio.sleep(0.15)
    assert len(server.engine.live) == 1
    writer.close()
    await server.settled()
    assert server.engine.metrics.request_success["abort"] == 1
