"""The express lane: the same answers as through aiohttp, in order, whatever comes before, after or in between."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from typing import Any

import pytest

from oneloop.api.connection import Connection
from oneloop.api.express import ExpressReply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
END = b"\r\n0\r\n\r\n"


def message(
    body: Any, path: str = COMPLETIONS, media_type: str = "application/json", headers: str = ""
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def by_aiohttp(body: Any, path: str = COMPLETIONS, headers: str = "") -> bytes:
    """The same in a form that is not looked for on the express lane."""
    return message(body, path, "Application/JSON", headers)


def stream(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 30, "seed": 1, "stream": True, **more}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ExpressReply]:
    """The replies that the express lane gave."""
    replies: list[ExpressReply] = []
    original = ExpressReply.__init__

    def init(self: ExpressReply, *arguments: Any) -> None:
        replies.append(self)
        original(self, *arguments)

    monkeypatch.setattr(ExpressReply, "__init__", init)
    return replies


async def ask(server: Any, data: bytes, num_replies: int = 1) -> bytes:
    """Everything that is answered on one connection, kept open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    received = b""
    async with asyncio.timeout(5):
        while len(re.findall(rb"HTTP/1\.1 \d", received)) < num_replies or not _is_whole(received):
            received += await reader.read(1 << 16)
    writer.close()
    return received


def _is_whole(received: bytes) -> bool:
    head, _, body = received[received.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return len(body) == int(length[1]) if length else received.endswith(END)


def parts(reply: bytes) -> tuple[set[str], bytes]:
    """(status and headers, body) without what differs from request to request."""
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = re.sub(r"(X-Request-Id|Date): [^\r]*", r"\1", head.decode())
    body = re.sub(rb'"id":"[a-z]+-\w+"|"created":\d+', b"", body)
    return set(lines.split("\r\n")), re.sub(rb"(^|\r\n)[0-9a-f]+\r\n", b"", body)


BODIES: dict[str, tuple[Any, str]] = {
    "text": (stream(), COMPLETIONS),
    "token ids": (stream(prompt=[1, 2, 3]), COMPLETIONS),
    "usage": (stream(stream_options={"include_usage": True}), COMPLETIONS),
    "running usage": (stream(stream_options={"continuous_usage_stats": True}), COMPLETIONS),
    "several": (stream(prompt=["a", "b"], n=2), COMPLETIONS),
    "log-probabilities": (stream(logprobs=2), COMPLETIONS),
    "echo": (stream(prompt=[65, 66], echo=True), COMPLETIONS),
    "no tokens": (stream(max_tokens=0, echo=True), COMPLETIONS),
    "without effect": (stream(wrong=1, user="x"), COMPLETIONS),
    "chat": ({"messages": [{"role": "user", "content": "a"}], "stream": True, "seed": 1}, CHAT),
    "out of range": (stream(temperature=-1), COMPLETIONS),
    "empty prompt": (stream(prompt=""), COMPLETIONS),
    "no prompt": ({"stream": True}, COMPLETIONS),
    "unknown model": (stream(model="none"), COMPLETIONS),
    "too long": (stream(prompt="a" * 300), COMPLETIONS),
    "no messages": ({"stream": True}, CHAT),
}


@pytest.mark.parametrize("name", BODIES)
async def test_same_reply_as_through_aiohttp(scripted: Any, taken: list[Any], name: str) -> None:
    scripted.engine.in_step = True
    body, path = BODIES[name]
    for _ in range(2):  # the second one is known from the first
        quick = await ask(scripted, message(body, path))
    assert len(taken) == 2
    slow = await ask(scripted, by_aiohttp(body, path))
    assert len(taken) == 2
    assert parts(quick) == parts(slow)
    await scripted.settled()
    metrics = (await scripted.get("/metrics"))[1]
    status = "2xx" if quick.startswith(b"HTTP/1.1 200") else "4xx"
    assert f'http_requests_total{{handler="{path}",method="POST",status="{status}"}} 3.0' in metrics


NOT_TAKEN = {
    "whole reply": message({"prompt": "a", "max_tokens": 3}),
    "stream is no flag": message(stream(stream=1)),
    "no JSON": message(b'{"stream": true'),
    "another media type": message(stream(), media_type="text/plain"),
    "another route": message({"prompt": "stream", "stream": True}, "/tokenize"),
    "a query": message(stream(), COMPLETIONS + "?a=b"),
    "expectation": message(stream(), headers="Expect: 100-continue\r\n"),
    "bad host": message(stream()).replace(b"Host: x", b"Host: a b"),
    "the end of the connection": message(stream(), headers="Connection: close\r\n"),
    "another protocol": message(stream(), headers="Connection: upgrade\r\nUpgrade: websocket\r\n"),
    "compression": message(stream(), headers="Content-Encoding: gzip\r\n"),
    "chunks": (
        message(b"", headers="Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(json.dumps(stream())), json.dumps(stream()).encode())
    ),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
async def test_what_is_not_of_the_usual_form_goes_through_aiohttp(
    server: Any, taken: list[Any], name: str
) -> None:
    received = await ask(server, NOT_TAKEN[name])
    assert received.startswith(b"HTTP/1.1 ")
    assert not taken


async def test_the_key_is_asked_for(serve: Any, taken: list[Any]) -> None:
    async with serve(api_key="secret") as server:
        assert b" 401 " in await ask(server, message(stream()))
        assert b" 401 " in await ask(server, message(stream(), headers="Authorization: Bearer secre\r\n"))
        assert not taken
        assert b" 200 " in await ask(server, message(stream(), headers="Authorization: Bearer secret\r\n"))
        assert len(taken) == 1


async def test_bodies_are_bounded_here_too(serve: Any, taken: list[Any]) -> None:
    async with serve(max_body_bytes=200) as server:
        assert b" 200 " in await ask(server, message(stream()))
        assert len(taken) == 1
        assert b" 413 " in await ask(server, message(stream(user="x" * 200)))
        assert len(taken) == 1


async def test_the_clients_own_ids_are_repeated(server: Any) -> None:
    reply = await ask(server, message(stream(), headers="X-Request-Id: from-head\r\n"))
    assert b"X-Request-Id: from-head\r\n" in reply
    reply = await ask(server, message(stream(request_id="from-body"), headers="X-Request-Id: from-head\r\n"))
    assert b"X-Request-Id: from-body\r\n" in reply
    assert b'"id":"cmpl-from-body"' in reply
    reply = await ask(server, message(stream(request_id="from-body", model="none")))
    assert b"404 Not Found\r\n" in reply


@pytest.mark.parametrize("order", ["eeee", "aaaa", "eaea", "aeae", "eeaa", "gegeag"])
async def test_one_after_the_other_on_one_connection(server: Any, taken: list[Any], order: str) -> None:
    """All at once: answered in order, whichever lane each takes; aiohttp's task goes on with what it finds behind."""
    server.engine.step_s = 0.001
    kinds = {
        "e": lambda number: message(stream(request_id=f"r{number}", max_tokens=5)),
        "a": lambda number: by_aiohttp(stream(request_id=f"r{number}", max_tokens=5)),
        "g": lambda number: f"GET /version HTTP/1.1\r\nHost: x\r\nX-Request-Id: r{number}\r\n\r\n".encode(),
    }
    data = b"".join(kinds[kind](number) for number, kind in enumerate(order))
    received = await ask(server, data, len(order))
    ids = [int(number) for number in re.findall(rb"X-Request-Id: r(\d)", received)]
    assert ids == list(range(len(order)))
    assert received.count(b"[DONE]") == len(order) - order.count("g")
    assert bool(taken) == order.startswith("e")
    await server.settled()


async def test_many_requests_behind_each_other(server: Any) -> None:
    """More than aiohttp's parser gives out at once: reading stops and goes on."""
    received = await ask(server, message(stream(max_tokens=2)) * 200, 200)
    assert received.count(b"[DONE]") == 200


async def test_idle_connections_end_and_busy_ones_do_not(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneloop.api.server.HEADER_TIMEOUT_S", 0.3)
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        server.engine.paused.clear()
        writer.write(message(stream()))
        await asyncio.sleep(0.7)
        server.engine.paused.set()
        assert (await asyncio.wait_for(reader.readuntil(END), 2)).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        assert await asyncio.wait_for(reader.read(), 3) == b""
        assert 0.2 < time.monotonic() - begin < 2
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 3) == b"", "who never asks is not waited for either"
        writer.close()


async def test_leaving_while_the_prompt_is_prepared(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()

    async def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        await asyncio.sleep(5)
        raise AssertionError("it was to be cancelled")

    monkeypatch.setattr(server.engine, "encode", encode)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(message(stream()))
    await asyncio.wait_for(begun.wait(), 2)
    num_tasks = len(asyncio.all_tasks())
    writer.close()
    async with asyncio.timeout(2):
        while len(asyncio.all_tasks()) >= num_tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not server.engine.submitted
    metrics = (await server.get("/metrics"))[1]
    assert f'http_requests_total{{handler="{COMPLETIONS}",method="POST",status="4xx"}} 1.0' in metrics


async def test_a_bug_in_preparing_is_a_status(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server.engine, "encode", encode)
    reply = await ask(server, message(stream()))
    assert reply.startswith(b"HTTP/1.1 500 ")
    assert b"ZeroDivision" not in reply


async def test_what_waits_behind_a_stalled_reader_is_not_begun(
    serve: Any, null_engine_type: Any, taken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with serve(
        null_engine_type(max_model_len=50_000, num_blocks=1 << 16), write_timeout_s=0.2
    ) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(message(stream(max_tokens=40_000, ignore_eos=True, n=8)) + message(stream()))
        await reader.readuntil(b"data: ")
        await server.settled()
        await asyncio.sleep(0.02)
        assert len(taken) == 1
        writer.close()


async def test_its_time_is_counted(server: Any) -> None:
    server.engine.step_s = 0.02
    await ask(server, message(stream(max_tokens=5, ignore_eos=True)))
    await server.settled()
    metrics = (await server.get("/metrics"))[1]
    (seconds,) = re.findall(
        rf'http_request_duration_seconds_sum{{handler="{COMPLETIONS}"[^}}]*}} (\S+)', metrics
    )
    assert 0.08 < float(seconds) < 5
