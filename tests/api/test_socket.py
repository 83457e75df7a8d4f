"""/v1/stream over the double of the engine: many generations, credit, limits, what clients do wrong."""
# ruff: noqa: E501, ASYNC110  (tables; polling)

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from oneloop.api.limits import MAX_SOCKET_GENERATIONS, MAX_SOCKET_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 1}


class Talk:
    """A socket's client; what is received is kept by generation."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.received: dict[str | None, list[dict[str, Any]]] = {}
        self.order: list[str | None] = []

    async def open(
        self, name: str, body: dict[str, Any] = CHAT, endpoint: str = "chat", **members: Any
    ) -> None:
        await self.ws.send_json({"type": "open", "id": name, "endpoint": endpoint, "body": body, **members})

    async def say(self, **message: Any) -> None:
        await self.ws.send_json(message)

    async def next(self) -> dict[str, Any]:
        message = await asyncio.wait_for(self.ws.receive(), 5)
        assert message.type is aiohttp.WSMsgType.TEXT, message
        found: dict[str, Any] = json.loads(message.data)
        self.received.setdefault(found.get("id"), []).append(found)
        self.order.append(found.get("id"))
        return found

    async def until_ended(self, *names: str) -> None:
        """Read until each of them is done or has failed."""
        open_names = set(names) - {name for name in names if self.has_ended(name)}
        while open_names:
            message = await self.next()
            if message["type"] in ("done", "error"):
                open_names.discard(str(message["id"]))

    def has_ended(self, name: str) -> bool:
        messages = self.received.get(name, [])
        return bool(messages) and messages[-1]["type"] in ("done", "error")

    def chunks(self, name: str) -> list[dict[str, Any]]:
        return [message["chunk"] for message in self.received.get(name, []) if message["type"] == "delta"]

    def text(self, name: str) -> str:
        choices = [chunk["choices"][0] for chunk in self.chunks(name) if chunk["choices"]]
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices
        )


@asynccontextmanager
async def talking(server: Any, **options: Any) -> AsyncIterator[Talk]:
    async with server.session.ws_connect(server.url + "/v1/stream", **options) as ws:
        yield Talk(ws)


async def test_it_says_what_the_stream_says(scripted: Any) -> None:
    scripted.engine.in_step = True
    body = {**CHAT, "logprobs": True, "stream_options": {"continuous_usage_stats": True}, "nonsense": 1}
    events = await scripted.stream("/v1/chat/completions", body)
    expected = [json.loads(event) for event in events[:-1]]
    async with talking(scripted) as talk:
        await talk.open("a", {**body, "stream": True})
        await talk.until_ended("a")
    opened, *_, done = talk.received["a"]
    assert opened["type"] == "opened"
    assert opened["ignored"] == "nonsense"
    chunks = talk.chunks("a")
    assert chunks[0]["id"] == f"chatcmpl-{opened['request_id']}"
    same = [{**chunk, "id": "", "created": 0} for chunk in chunks]
    assert same == [{**chunk, "id": "", "created": 0} for chunk in expected]
    assert (done["type"], done["cancelled"]) == ("done", False)
    assert done["usage"] == chunks[-1]["usage"]


async def test_many_at_once(server: Any) -> None:
    server.engine.step_s = 0.001
    names = [f"g{number}" for number in range(40)]
    expected = {}
    for seed in range(40):
        reply = (await server.post("/v1/completions", {"prompt": "x", "max_tokens": 80, "seed": seed}))[1]
        expected[f"g{seed}"] = reply["choices"][0]["text"]
    async with talking(server) as talk:
        for seed, name in enumerate(names):
            await talk.open(name, {"prompt": "x", "max_tokens": 80, "seed": seed}, "completions")
        await talk.until_ended(*names)
    assert {name: talk.text(name) for name in names} == expected
    firsts = talk.order.index("g39")
    assert any(name == "g0" for name in talk.order[firsts:]), "they run beside each other"


async def test_several_choices_and_prompts(server: Any) -> None:
    async with talking(server) as talk:
        await talk.open("a", {"prompt": ["x", "y"], "n": 2, "max_tokens": 5}, "completions")
        await talk.open("none", {"prompt": "x", "max_tokens": 0, "echo": True}, "completions")
        await talk.until_ended("a", "none")
    finished = [chunk["choices"][0] for chunk in talk.chunks("a") if chunk["choices"][0]["finish_reason"]]
    assert {choice["index"] for choice in finished} == {0, 1, 2, 3}
    assert talk.received["a"][-1]["usage"]["completion_tokens"] == 20
    assert talk.text("none") == "x"


async def test_credit_holds_it_back(server: Any) -> None:
    server.engine.step_s = 0.001
    async with talking(server) as talk:
        await talk.open("a", credit=2)
        await talk.open("free")
        await talk.until_ended("free")
        assert len(talk.chunks("a")) == 2
        await server.settled()  # what it has to tell waits, merged
        await talk.say(type="credit", id="a", add=1)
        await talk.open("b")
        await talk.until_ended("b")
        assert len(talk.chunks("a")) == 3
        await talk.say(type="credit", id="a", add=100)
        await talk.until_ended("a")
    assert len(talk.chunks("a")) < 10
    assert talk.text("a") == talk.text("free")


async def test_what_waits_for_credit_is_one_delta(scripted: Any) -> None:
    """However many steps it came in."""
    scripted.engine.script = "x" * 60
    async with talking(scripted) as talk:
        body = {"prompt": "hello", "max_tokens": 60, "n": 2}
        await talk.open("a", body, "completions", credit=0)
        assert (await talk.next())["type"] == "opened"
        await scripted.settled()
        await talk.say(type="credit", id="a", add=2)
        await talk.until_ended("a")
    texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in talk.chunks("a")}
    assert len(talk.chunks("a")) == 2
    assert texts == {0: "x" * 60, 1: "x" * 60}


async def test_cancelled_before_it_has_begun(scripted: Any) -> None:
    """The two messages come together, so the second is read while the first one's prompt is prepared."""
    scripted.engine.step_s, scripted.engine.script = 0.02, "x" * 200
    async with talking(scripted) as talk:
        await talk.open("a", {**CHAT, "max_tokens": 200})
        await talk.say(type="cancel", id="a")
        await talk.until_ended("a")
        assert talk.received["a"][-1]["cancelled"]
        assert not scripted.engine.live
    assert scripted.engine.generated < 50


async def test_without_credit_for_too_long(serve: Any) -> None:
    async with serve(write_timeout_s=0.2) as server, talking(server) as talk:
        await talk.open("a", credit=0)
        await talk.until_ended("a")
        assert talk.received["a"][-1]["error"]["code"] == 408
        talk.received.clear()
        await talk.open("a", credit=1000)
        await talk.until_ended("a")
        assert talk.received["a"][-1]["type"] == "done"
        await server.settled()


async def test_cancelling(scripted: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.002, "x" * 300
    body = {**CHAT, "max_tokens": 200}
    async with talking(scripted) as talk:
        await talk.open("a", body)
        await talk.open("b", body)
        await talk.open("held", body, credit=1)
        while len(talk.chunks("a")) < 3:
            await talk.next()
        await talk.say(type="cancel", id="a")
        await talk.say(type="cancel", id="held")
        await talk.until_ended("a", "b", "held")
    assert talk.received["a"][-1]["cancelled"] is True
    assert talk.chunks("a")[-1]["choices"][0]["finish_reason"] == "abort"
    assert talk.received["held"][-1]["cancelled"] is True
    assert (talk.received["b"][-1]["cancelled"], len(talk.text("b"))) == (False, 200)
    await scripted.settled()


async def test_controlling_by_its_id(scripted: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.002, "x" * 300
    async with talking(scripted) as talk:
        await talk.open("a", {**CHAT, "max_tokens": 200, "request_id": "mine"})
        assert (await talk.next())["request_id"] == "mine"
        assert (await scripted.post("/v1/requests/mine/control", {"action": "cancel"}))[0] == 200
        await talk.until_ended("a")
    assert talk.chunks("a")[-1]["choices"][0]["finish_reason"] == "abort"


async def test_who_leaves_ends_all(server: Any) -> None:
    server.engine.paused.clear()
    async with talking(server) as talk:
        for number in range(5):
            await talk.open(f"g{number}")
        while len(talk.order) < 5:
            await talk.next()
        assert len(server.engine.live) == 5
    await server.settled()


async def test_a_connection_that_breaks(scripted: Any) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.005, "x" * 300
    async with aiohttp.ClientSession() as session:
        ws = await session.ws_connect(scripted.url + "/v1/stream")
        talk = Talk(ws)
        await talk.open("a", {**CHAT, "max_tokens": 200})
        await talk.next()
        transport = ws._response.connection.transport  # type: ignore[union-attr]
        transport.abort()
        await scripted.settled()


async def test_a_reader_that_stops_is_cut(serve: Any, fake_engine_type: Any) -> None:
    async with serve(fake_engine_type(), write_timeout_s=0.3) as server:
        server.engine.script = "x" * 200
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = "GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(
            f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        body = {**CHAT, "max_tokens": 200, "n": 60, "logprobs": True, "top_logprobs": 20}
        for number in range(60):
            writer.write(frame({"type": "open", "id": f"g{number}", "endpoint": "chat", "body": body}))
        async with asyncio.timeout(10):
            while not server.engine.prompts or server.engine.live:
                await asyncio.sleep(0.02)
        assert server.engine.generated > 0
        writer.close()


def frame(message: dict[str, Any]) -> bytes:
    """A client's text frame, with a mask of zeros."""
    data = json.dumps(message).encode()
    return bytes([0x81, 0xFE, *len(data).to_bytes(2, "big"), 0, 0, 0, 0]) + data


async def test_errors_of_a_generation(scripted: Any) -> None:
    async with talking(scripted) as talk:
        await talk.open("bad", {**CHAT, "temperature": -1})
        await talk.open("none", {"model": "other", **CHAT})
        await talk.open("good")
        await talk.until_ended("bad", "none", "good")
        assert talk.received["bad"][0]["error"]["param"] == "temperature"
        assert talk.received["none"][0]["error"]["code"] == 404
        assert talk.received["good"][-1]["type"] == "done"
        scripted.engine.fail_after = 3
        await talk.open("fails")
        await talk.until_ended("fails")
        assert talk.received["fails"][-1]["error"]["code"] == 500
        scripted.engine.overloaded = True
        await talk.open("busy")
        await talk.until_ended("busy")
        assert talk.received["busy"][-1]["error"]["code"] == 503


BAD: list[tuple[Any, str | None]] = [
    ("", None), ("x", None), ("[]", None), ("{}", "type"), ('{"type":1}', "type"), ('{"type":"x"}', "type"),
    ({"type": "open", "endpoint": "chat", "body": {}}, "id"), ({"type": "open", "id": "a b", "endpoint": "chat", "body": {}}, "id"),
    ({"type": "open", "id": "x" * 65, "endpoint": "chat", "body": {}}, "id"), ({"type": "open", "id": "a", "body": {}}, "endpoint"),
    ({"type": "open", "id": "a", "endpoint": "x", "body": {}}, "endpoint"), ({"type": "open", "id": "a", "endpoint": "chat"}, "body"),
    ({"type": "open", "id": "a", "endpoint": "chat", "body": []}, "body"),
    ({"type": "open", "id": "a", "endpoint": "chat", "body": {}, "credit": -1}, "credit"),
    ({"type": "open", "id": "a", "endpoint": "chat", "body": {}, "credit": 2**70}, "credit"),
    ({"type": "credit", "id": "a", "add": 1}, "id"), ({"type": "credit", "id": "a"}, "add"), ({"type": "cancel", "id": "a"}, "id"),
    ({"type": "cancel"}, "id"), ('{"type":"ping","x":NaN}', "x"), ('{"type":"ping","x":"\\ud800"}', None), ("[" * 5000, None),
]  # fmt: skip


async def test_messages_that_are_none(server: Any) -> None:
    async with talking(server) as talk:
        for message, param in BAD:
            await talk.ws.send_str(message if isinstance(message, str) else json.dumps(message))
            error = await talk.next()
            assert (error["type"], error["id"], error["error"]["code"]) == ("error", None, 400), message
            assert error["error"]["param"] == param, message
            assert len(error["error"]["message"]) < 300
        await talk.say(type="ping")
        assert await talk.next() == {"type": "pong"}
    assert server.engine.submitted == []


async def test_limits(server: Any) -> None:
    server.engine.paused.clear()
    async with talking(server) as talk:
        await talk.open("a")
        await talk.open("a")
        while None not in talk.received:
            await talk.next()
        assert talk.received[None][0]["error"]["param"] == "id"
        for number in range(MAX_SOCKET_GENERATIONS):
            await talk.open(f"g{number}")
        while len(talk.received[None]) < 2:
            await talk.next()
        assert str(MAX_SOCKET_GENERATIONS) in talk.received[None][1]["error"]["message"]
        assert len(server.engine.live) <= MAX_SOCKET_GENERATIONS
    await server.settled()
    async with talking(server) as talk:
        await talk.ws.send_str("x" * (MAX_SOCKET_MESSAGE_BYTES + 1))
        message = await asyncio.wait_for(talk.ws.receive(), 5)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1009)
    async with talking(server) as talk:
        await talk.ws.send_bytes(b"{}")
        message = await asyncio.wait_for(talk.ws.receive(), 5)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1003)


async def test_long_talks_pass(server: Any) -> None:
    """More bytes than a request's head may have."""
    async with talking(server) as talk:
        for _ in range(300):
            await talk.say(type="ping", filler="x" * 1000)
            assert (await talk.next())["type"] == "pong"


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 101), ("http://127.0.0.1:{port}", 101), ("http://evil.example", 403), ("null", 403), ("http://127.0.0.1", 403), ("http://[x", 403), ("", 403)],
)  # fmt: skip
async def test_origins(server: Any, origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"Origin": origin.format(port=server.port)}
    if status == 101:
        async with talking(server, headers=headers) as talk:
            await talk.say(type="ping")
            assert (await talk.next())["type"] == "pong"
        return
    with pytest.raises(aiohttp.WSServerHandshakeError) as error:
        await server.session.ws_connect(server.url + "/v1/stream", headers=headers)
    assert error.value.status == status


async def test_no_upgrade(server: Any) -> None:
    async with server.session.get(server.url + "/v1/stream") as reply:
        assert reply.status == 426
        assert reply.headers["Upgrade"] == "websocket"


async def test_the_key(serve: Any) -> None:
    async with serve(api_key="k") as server:
        with pytest.raises(aiohttp.WSServerHandshakeError) as error:
            await server.session.ws_connect(server.url + "/v1/stream")
        assert error.value.status == 401
        async with talking(server, headers={"Authorization": "Bearer k"}) as talk:
            await talk.open("a")
            await talk.until_ended("a")


async def test_the_servers_end(scripted: Any) -> None:
    scripted.engine.step_s = 100.0
    async with talking(scripted) as talk:
        await talk.open("a")
        await talk.next()
        scripted.stop.set()
        await talk.until_ended("a")
        last = talk.received["a"][-1]
        assert (last["type"], last["error"]["code"]) == ("error", 503)
        message = await asyncio.wait_for(talk.ws.receive(), 5)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
        await scripted.task
