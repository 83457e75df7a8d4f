"""The end of a server (B-06 in small): nothing new, what can end ends whole, the rest is told."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from oneloop.engine.event_loop import turn_loop
from oneloop.engine.loop_times import LoopTimes

COMPLETIONS = "/v1/completions"


async def test_running_requests_end_whole(serve: Any) -> None:
    async with serve(shutdown_timeout=5.0) as server:
        server.engine.step_s = 0.002
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
        streams = [asyncio.create_task(server.stream(COMPLETIONS, body)) for _ in range(10)]
        wholes = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(10)]
        await asyncio.sleep(0.1)
        server.stop.set()
        assert {events[-1] for events in await asyncio.gather(*streams)} == {"[DONE]"}
        assert {status for status, _ in await asyncio.gather(*wholes)} == {200}
        begin = time.monotonic()
        await server.task
        assert time.monotonic() - begin < 1.0


async def test_what_cannot_end_in_time_is_told(serve: Any) -> None:
    async with serve(shutdown_timeout=0.3) as server:
        server.engine.step_s = 0.02
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
        stream = asyncio.create_task(server.stream(COMPLETIONS, body))
        whole = asyncio.create_task(server.session.post(server.url + COMPLETIONS, json=body))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        server.stop.set()
        events = await stream
        assert json.loads(events[-1])["error"]["type"] == "ServiceUnavailableError"
        assert len(events) > 2
        async with await whole as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "10")
            assert (await reply.json())["error"]["type"] == "ServiceUnavailableError"
        await server.task
        assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize("stream", [True, False], ids=["express", "aiohttp"])
@pytest.mark.parametrize("is_used", [True, False], ids=["kept", "new"])
async def test_nothing_new_during_the_drain(serve: Any, stream: bool, is_used: bool) -> None:
    """New connections are refused; one that was there before gets 503 with Retry-After, and is closed."""
    async with serve(shutdown_timeout=2.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
        data = json.dumps({"prompt": "a", "max_tokens": 1, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        if is_used:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            if stream:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                await reader.readexactly(int(answer.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        server.engine.step_s = 0.01
        running = asyncio.create_task(
            server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 50, "ignore_eos": True})
        )
        await asyncio.sleep(0.05)
        server.stop.set()
        await asyncio.sleep(0.05)
        try:
            await asyncio.open_connection("127.0.0.1", server.port)
            raise AssertionError("a new connection was accepted")
        except ConnectionRefusedError:
            pass
        writer.write(request)
        refusal = await asyncio.wait_for(reader.read(), 2)  # to the end of the connection
        assert not running.done()
        head, _, body = refusal.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 10\r\n" in head
        assert b"\r\nConnection: close" in head
        assert json.loads(body)["error"]["message"] == "the server is shutting down"
        assert (await running)[0] == 200
        assert await asyncio.wait_for(idle.read(), 2) == b"", "idle connections are closed at the end"
        writer.close()
        idle_writer.close()


async def test_stop_with_nothing_running_is_quick(serve: Any) -> None:
    async with serve(shutdown_timeout=30.0) as server:
        assert (await server.get("/health"))[0] == 200
        begin = time.monotonic()
        server.stop.set()
        await server.task
        assert time.monotonic() - begin < 0.5


async def test_a_stalled_reader_does_not_hold_up_the_end(serve: Any, null_engine_type: Any) -> None:
    engine = null_engine_type(max_model_len=10**6, num_blocks=1 << 16)
    async with serve(engine, shutdown_timeout=0.2, write_timeout_s=60.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        body = {"prompt": "a", "max_tokens": 900_000, "ignore_eos": True, "stream": True, "n": 16}
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(data) + data
        )
        await reader.readuntil(b"data: ")
        async with asyncio.timeout(20):
            while sum(len(d.text) for s in engine.live.values() for d in s._pending.values()) < 10_000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        begin = time.monotonic()
        server.stop.set()
        await server.task
        assert time.monotonic() - begin < 3.5
        writer.close()


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON"], ids=["express", "aiohttp"])
async def test_a_slow_reader_is_told_all_the_same(
    serve: Any, null_engine_type: Any, monkeypatch: pytest.MonkeyPatch, media_type: str
) -> None:
    """Who reads on is waited for, and nobody any longer once it has its last events."""
    monkeypatch.setattr("oneloop.api.server.LAST_WORDS_S", 3.0)
    engine = null_engine_type(max_model_len=10**6, num_blocks=1 << 16)
    async with serve(engine, shutdown_timeout=0.1, write_timeout_s=60.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        data = json.dumps({"prompt": "a", "max_tokens": 900_000, "ignore_eos": True, "stream": True, "n": 16})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        async with asyncio.timeout(20):
            while sum(len(d.text) for s in engine.live.values() for d in s._pending.values()) < 10_000:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        server.stop.set()
        await asyncio.sleep(0.4)
        received = b""
        async with asyncio.timeout(2):
            while not received.endswith(b"\r\n0\r\n\r\n"):
                piece = await reader.read(1 << 20)
                assert piece, "the connection ended before the reply"
                received += piece
        assert b"ServiceUnavailableError" in received.rpartition(b"data: ")[2]
        begin = time.monotonic()
        await server.task
        assert time.monotonic() - begin < 1.0
        writer.close()


@pytest.mark.parametrize("stream", [True, False], ids=["express", "aiohttp"])
@pytest.mark.parametrize(("takes_s", "expected"), [(0.2, 200), (0.8, 503)], ids=["in time", "too late"])
async def test_who_is_being_tokenised_is_waited_for(
    serve: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, takes_s: float, expected: int
) -> None:
    began = asyncio.Event()

    async def encode(_: str, *, add_special_tokens: bool = True) -> list[int]:
        began.set()
        await asyncio.sleep(takes_s)
        return [1, 2, 3]

    async with serve(shutdown_timeout=0.5) as server:
        monkeypatch.setattr(server.engine, "encode", encode)
        body = {"prompt": "a", "max_tokens": 3, "stream": stream}
        asking = asyncio.create_task(server.session.post(server.url + COMPLETIONS, json=body))
        await began.wait()
        server.stop.set()
        async with await asking as reply:
            assert reply.status == expected
            await reply.read()
        await server.task


async def test_tokenising_is_part_of_the_time_that_running_requests_get(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = asyncio.Event()

    async def encode(_: str, *, add_special_tokens: bool = True) -> list[int]:
        began.set()
        await asyncio.sleep(0.8)
        return [1, 2, 3]

    async with serve(shutdown_timeout=1.0) as server:
        monkeypatch.setattr(server.engine, "encode", encode)
        server.engine.step_s = 0.02
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
        asking = asyncio.create_task(server.post(COMPLETIONS, body))
        await began.wait()
        server.stop.set()
        begin = time.monotonic()
        assert (await asking)[0] == 503
        assert 0.9 < time.monotonic() - begin < 1.5


async def test_who_comes_while_others_are_tokenised_is_refused(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be cut off soon: what time is left is for those that were there before."""
    began, gate = asyncio.Event(), asyncio.Event()

    async def encode(_: str, *, add_special_tokens: bool = True) -> list[int]:
        began.set()
        await gate.wait()
        return [1, 2, 3]

    async with serve(shutdown_timeout=5.0) as server:
        kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        monkeypatch.setattr(server.engine, "encode", encode)
        before = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3}))
        await began.wait()
        server.stop.set()
        await asyncio.sleep(0.05)
        asked = {"prompt": [1, 2], "max_tokens": 1}
        for (reader, writer), stream in zip(kept, (True, False), strict=False):
            data = json.dumps({**asked, "stream": stream}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            refusal = await asyncio.wait_for(reader.read(), 2)
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 10\r\n" in refusal
            writer.close()
        reader, writer = kept[2]
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP/1.1 503 ")
        writer.close()
        gate.set()
        assert (await before)[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize("stream", [True, False], ids=["express", "aiohttp"])
async def test_who_comes_when_the_drain_is_over_is_told_the_same(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Between the engine's end and that of the connections: a trace may have to be written, a GPU to be left."""
    over = asyncio.Event()
    async with serve(shutdown_timeout=1.0) as server:
        shutdown = server.engine.shutdown

        async def slow_shutdown(drain_timeout: float = 0.0) -> None:
            await shutdown(drain_timeout)
            over.set()
            await asyncio.sleep(0.3)

        monkeypatch.setattr(server.engine, "shutdown", slow_shutdown)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        server.stop.set()
        await over.wait()
        data = json.dumps({"prompt": "a", "max_tokens": 0, "echo": True, "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head, _, body = (await asyncio.wait_for(reader.read(), 2)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 10" in head
        assert b"\r\nConnection: close" in head
        assert json.loads(body)["error"]["message"] == "the server is shutting down"
        writer.close()


def test_who_has_asked_already_is_answered(serve: Any) -> None:
    """On the product's event loop, which looks at a few connections in a turn: none of the others is taken for idle."""

    async def scenario() -> None:
        async with serve(shutdown_timeout=5.0) as server:
            body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            connected = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(60)]
            await asyncio.sleep(0.1)
            waiting = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(20)]
            for client in connected + waiting:
                client.sendall(request)
            server.stop.set()
            await server.task
            for client in connected + waiting:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
                client.close()

    with asyncio.Runner(loop_factory=turn_loop(LoopTimes())) as runner:
        runner.run(scenario())
