"""Streamed replies whose text the relay writes: over HTTP, with the real engine; what clients see is the same."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import socket
from typing import Any

import pytest

from oneloop.api.chunks import ChunkEncoder
from oneloop.api.connection import Connection
from oneloop.engine.stream import RequestStream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = 'words and "quotes", back\\slashes, 日本語, naïve 👩‍🚀,\n\ttabs \x7f\x1b, and so on. ' * 3


@pytest.fixture
def served(serve: Any, null_engine_type: Any) -> Any:
    """Starts a server whose sequences "sample" TEXT from places of their own."""

    def start(step_s: float = 0.0, **settings: Any) -> Any:
        engine = null_engine_type(
            step_s=step_s,
            tokens=list(TEXT.encode()),
            max_model_len=8192,
            max_num_seqs=64,
            enable_prefix_caching=False,  # or usage tells which of two equal requests was the first
        )
        return serve(engine, **settings)

    return start


def texts_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events[:-1]]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert parts[-1]["finish_reason"] is not None
    return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
LOGPROBS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 1},
        {"logprobs": True, "top_logprobs": 20},
    ],
    COMPLETIONS: [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 20}],
}


@pytest.mark.parametrize("shown", [0, 1, 2, 3])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ["naïve", "and so"]}, {"skip_special_tokens": False}, {"stream_options": CONTINUOUS}],
)
async def test_the_bytes_are_those_of_the_python_path(
    served: Any, monkeypatch: pytest.MonkeyPatch, path: str, shown: int, options: dict[str, Any]
) -> None:
    """The same request with and without the relay: the same events, to the byte."""
    async with served(0.001) as server:
        prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        body = {"stream_options": {"include_usage": True}, **prompt, **options, **LOGPROBS[path][shown]}
        body |= {"max_tokens": 120, "ignore_eos": True, "seed": 7, "request_id": "same"}
        num_pushed, in_python = 0, RequestStream.push

        def push(self: RequestStream, delta: Any, now: float) -> None:
            nonlocal num_pushed
            num_pushed += 1
            in_python(self, delta, now)

        monkeypatch.setattr(RequestStream, "push", push)
        found = [without_times(await server.stream(path, body))]
        assert num_pushed <= 5, "the relay did not take it"

        def attach(*_: Any, **__: Any) -> None:
            raise OSError(24, "too many open files")

        monkeypatch.setattr(server.engine._relay, "attach", attach)
        for _ in range(30):  # until Python has kept up: the relay merges nothing
            found.append(without_times(await server.stream(path, body)))
            if len(found[-1]) == len(found[0]):
                break
        assert found[-1] == found[0]


def without_times(events: list[str]) -> list[str]:
    return [re.sub(r'"created":\d+', "", event) for event in events]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_says_what_the_whole_reply_says(served: Any, path: str) -> None:
    source = random.Random(1)
    async with served() as server:

        async def one() -> None:
            body: dict[str, Any] = {"max_tokens": source.choice([1, 2, 7, 300]), "ignore_eos": True}
            if path == CHAT:
                body["messages"] = [{"role": "user", "content": "x" * source.randint(1, 40)}]
            else:
                body["prompt"] = "x" * source.randint(1, 40)
            if source.random() < 0.2:
                body["n"] = 2
            if source.random() < 0.2:
                body["stop"] = "naïve"
            options = {"include_usage": True, "continuous_usage_stats": source.random() < 0.2}
            events = await server.stream(path, {**body, "stream_options": options})
            assert events[-1] == "[DONE]"
            usage = json.loads(events[-2])["usage"]
            chunks = [json.loads(event) for event in events[:-2]]
            assert all(("usage" in chunk) for chunk in chunks)
            # What a sequence says depends on its seed, so it is checked by itself, not against another request.
            for choice in range(body.get("n", 1)):
                parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
                text = "".join(
                    part["text"] if path == COMPLETIONS else part["delta"].get("content", "")
                    for part in parts
                )
                assert text.replace("\ufffd", "") in TEXT * 20 or "\ufffd" in text
                assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
                if parts[-1]["finish_reason"] == "length" and "\ufffd" not in text:
                    assert len(text.encode()) == body["max_tokens"]
            if "stop" not in body:
                assert usage["completion_tokens"] == body["max_tokens"] * body.get("n", 1)

        for _ in range(6):
            await asyncio.gather(*[one() for _ in range(24)])
        assert server.engine.stats().num_running == 0


async def test_between_first_and_last_nothing_passes_python(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    original = ChunkEncoder.encode

    def encode(self: ChunkEncoder, choice: int, delta: Any) -> bytes:
        encoded.append(len(delta.token_ids))
        return original(self, choice, delta)

    monkeypatch.setattr(ChunkEncoder, "encode", encode)
    async with served(0.002) as server:
        events = await server.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 200, "ignore_eos": True})
        assert len(events) > 100, "a chunk per token with text"
        assert len(encoded) < 20
        metrics = server.engine.metrics
        gaps, decoding = metrics.inter_token_latency_seconds, metrics.request_decode_time_seconds
        assert (gaps.count, metrics.request_generation_tokens.total) == (199, 200)
        assert gaps.total == pytest.approx(decoding.total)
        assert gaps.total > 0.9 * 199 * 0.002, "a step takes 2 ms"


def request(body: Any) -> bytes:
    data = json.dumps({"stream": True, "ignore_eos": True, "prompt": "a", **body}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)


@pytest.mark.parametrize("shown", [{}, {"logprobs": 2, "stream_options": CONTINUOUS}])
async def test_a_slow_reader_gets_everything_in_order(
    served: Any, monkeypatch: pytest.MonkeyPatch, shown: dict[str, Any]
) -> None:
    """The socket stalls again and again: the relay hands back, Python goes on, the relay takes over again."""
    small_buffers(monkeypatch)
    async with served(0.0005) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(
            request({"max_tokens": 4000, "seed": 0, **shown})
        )  # from the start: no character is cut at its end
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await asyncio.wait_for(reader.read(3000), 10)
            if len(received) < 200_000:
                await asyncio.sleep(0.02)
        writer.close()
    body = received.partition(b"\r\n\r\n")[2]
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        data, body = data + rest[:length], rest[length + 2 :]
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n")[:-1]]
    text = texts_of(events)
    assert len(text.encode()) == 4000
    assert text in TEXT * 40
    if shown:
        check_running_counts(events, text)


def check_running_counts(events: list[str], text: str) -> None:
    """Each event has the log-probabilities of its tokens, bytes here, and the usage with them."""
    num_tokens = 0
    for event in events[:-1]:
        chunk = json.loads(event)
        for choice in chunk["choices"]:
            lists = choice["logprobs"]
            for offset in lists["text_offset"]:
                assert offset == len(text.encode()[:num_tokens].decode(errors="ignore"))
                num_tokens += 1
            assert {len(values) for values in lists.values()} == {len(lists["tokens"])}
        assert chunk["usage"]["completion_tokens"] == num_tokens
    assert num_tokens == len(text.encode())


async def test_a_reader_of_nothing_is_cut(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_buffers(monkeypatch)
    async with served(0.0002, write_timeout_s=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()
        writer.write(request({"max_tokens": 8000}))
        await until(lambda: server.engine.stats().num_running)
        await until(lambda: not server.engine.stats().num_running)
        writer.transport.resume_reading()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"[DONE]")
        writer.close()


async def test_clients_that_leave(served: Any) -> None:
    async with served(0.002) as server:
        connections = []
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request({"max_tokens": 8000}))
            connections.append((reader, writer))
        for reader, _ in connections:
            await reader.readuntil(b"\n\n\r\n")
        await asyncio.sleep(0.02)
        handles = list(server.engine._streams)
        for number, (_, writer) in enumerate(connections):
            if number % 2:
                writer.transport.abort()
            else:
                writer.close()
        await until(lambda: not server.engine.stats().num_running)
        assert [server.engine._relay.detach(handle) for handle in handles] == [None] * 30
        assert server.engine.metrics.request_success["abort"] == 30


async def test_shutdown_under_way(served: Any) -> None:
    async with served(0.002, shutdown_timeout=0.1) as server:
        tasks = [
            asyncio.create_task(
                server.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 8000, "ignore_eos": True})
            )
            for _ in range(10)
        ]
        gaps = server.engine.metrics.inter_token_latency_seconds
        await until(lambda: gaps.count > 30 * len(tasks))
        server.stop.set()
        for events in await asyncio.gather(*tasks):
            assert json.loads(events[-1])["error"]["type"] == "ServiceUnavailableError"
            assert len(events) > 10
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]).replace(
                "\ufffd", ""
            )
        await server.task


def kept_streams() -> int:
    """RequestStreams that are still in memory. Looks at every object there is, asking none for its class."""
    return sum(type(kept) is RequestStream for kept in gc.get_objects())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_nothing_to_the_collector(served: Any, stream: bool) -> None:
    """What a request held is freed with its last reference: full collections are rare on a server."""
    async with served() as server:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": stream}
                async with server.session.post(server.url + COMPLETIONS, json=body) as reply:
                    await reply.read()
            assert server.engine.metrics.request_success["length"] == 5
            async with asyncio.timeout(10):
                while await asyncio.to_thread(kept_streams):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_connections_are_used_again(served: Any) -> None:
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(30):
            writer.write(request({"max_tokens": 50}))
            received = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 5)
            assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


async def test_a_machine_without_descriptors_left_goes_on_in_python(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as server:

        def attach(*_: Any, **__: Any) -> None:
            raise OSError(24, "too many open files")

        monkeypatch.setattr(server.engine._relay, "attach", attach)
        events = await server.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 100, "ignore_eos": True})
        assert texts_of(events)
        assert events[-1] == "[DONE]"


async def test_slices_that_are_too_short_for_a_step(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One event per turn of the loop: steps overtake what waits, which is merged; every stream gets on."""
    monkeypatch.setattr("oneloop.engine.relay.SLICE_S", 0.0)
    async with served() as server:
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
        found = await asyncio.gather(*[server.stream(COMPLETIONS, body) for _ in range(40)])
    for events in found:
        assert events[-1] == "[DONE]"
        text = texts_of(events)
        assert "\ufffd" in text or text in TEXT * 5
        assert len(events) > 5


@pytest.mark.parametrize("max_tokens", [1, 40])
async def test_headers_leave_with_the_first_events(
    served: Any, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """And the last events with the end of the body."""
    written: list[bytes] = []
    original = Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        original(self, Recording(transport, written))

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    async with served(0.001) as server:
        await server.stream(COMPLETIONS, {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True})
    assert written[0].startswith(b"HTTP/1.1 200 OK")
    assert b'data: {"id"' in written[0]
    assert written[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"finish_reason":"length"' in written[-1]
    assert len(written) <= 2 + max_tokens // 10, "the relay does the rest"


class Recording:
    """A transport whose writes are noted."""

    def __init__(self, transport: Any, written: list[bytes]) -> None:
        self._transport, self._written = transport, written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written.append(bytes(data))
        self._transport.write(data)
