"""A server for the load test's client that does what a request tells it to: {"fault": …} among its fields."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from typing import Any

import pytest

CHAT = "/v1/chat/completions"


def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
    return json.dumps({"id": "x", "object": "chunk", "model": "fake", "choices": choices, **more})


class Fake:
    """The server, on an event loop in a thread of its own. `bodies`: every request's JSON, in the order of arrival."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_at_once = self.most_at_once = 0
        self.card: dict[str, Any] = {"id": "fake-model"}
        """What /v1/models says of the one model."""
        self.num_looks = 0
        """How often it was asked."""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        starting = asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        async def end() -> None:
            # Connections that are just being accepted must become tasks of ours before the server is closed.
            while accepting := asyncio.all_tasks() - self._tasks - {asyncio.current_task()}:
                await asyncio.wait(accepting)
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        self._tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [line for line in head.split("\r\n") if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(length[0].split(":")[1])) if length else b""
                self.num_at_once += 1
                self.most_at_once = max(self.most_at_once, self.num_at_once)
                try:
                    await self._answer(head, body, writer)
                finally:
                    self.num_at_once -= 1
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /v1/models"):
            self.num_looks += 1
            return self._whole(writer, {"data": [self.card]})
        asked = json.loads(body)
        self.heads.append(head)
        self.bodies.append(asked)
        fault, is_chat = asked.get("fault"), CHAT in head
        if fault == "500":
            return self._whole(writer, {"error": {"message": "broken"}}, status="500 Internal Server Error")
        if fault == "each its own 400":
            message = f"request {self.num_at_once}-{len(self.bodies):04x}: {asked['prompt'][0]} is out of vocabulary"
            return self._whole(writer, {"error": {"message": message}}, status="400 Bad Request")
        if fault == "garbage":
            writer.write(b"this is no HTTP\r\n\r\n")
            return writer.close()
        if fault == "hang":
            await asyncio.sleep(60)
        if not asked.get("stream"):
            return self._whole(writer, whole(asked, is_chat))
        events = stream(asked, is_chat)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for place, event in enumerate(events):
            if fault == "cut" and place == len(events) // 2:
                return writer.close()
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(asked.get("delay", 0))
        writer.write(b"0\r\n\r\n")
        if fault == "close after":
            writer.close()  # without having said so: the next request over it is lost
        return None

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, body: Any, status: str = "200 OK") -> None:
        data = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(data), data))


def num_prompt_tokens(asked: dict[str, Any]) -> int:
    """Ids, or words."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt] if prompt is not None else [message["content"] for message in asked["messages"]]
    return sum(len(text.split()) for text in texts)


def usage_of(asked: dict[str, Any]) -> dict[str, int]:
    fault, prompt, completion = asked.get("fault"), num_prompt_tokens(asked), asked.get("max_tokens", 16)
    prompt += fault == "wrong prompt count"
    completion -= fault == "wrong completion count"
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion + (fault == "wrong sum"),
    }


def whole(asked: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    text = " word" * asked.get("max_tokens", 16)
    choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": "length", **choice}], "usage": usage_of(asked)}


def stream(asked: dict[str, Any], is_chat: bool) -> list[str]:
    """The events' data."""
    fault, count = asked.get("fault"), asked.get("max_tokens", 16)

    def item(text: str, reason: str | None = None, role: str | None = None) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": role} if role else {}
        inner = {"delta": {**delta, "content": text}} if is_chat else {"text": text}
        return {"index": 0, **inner, "logprobs": None, "finish_reason": reason}

    texts = [item(f" w{place}") for place in range(count - 1)] + [item(" last", "length")]
    if fault == "no finish":
        texts[-1] = item(" last")
    if fault == "two finishes":
        texts.append(item("", "stop"))
    if fault == "text after finish":
        texts.append(item(" more"))
    events = [chunk([one], usage=None) for one in texts]
    role = chunk([item("", role="assistant")], usage=None)
    if is_chat and fault != "no role":
        events.insert(1 if fault == "late role" else 0, role)
    if is_chat and fault == "two roles":
        events.insert(3, role)
    if fault == "malformed":
        events.insert(2, '{"choices": [')
    if fault == "error in the stream":
        return [*events[:2], json.dumps({"error": {"message": "out of memory"}})]
    if fault != "no usage":
        events.append(chunk([], usage=usage_of(asked)))
    if fault != "no done":
        events.append("[DONE]")
    if fault == "event after done":
        events.append(chunk([item(" late")]))
    return events


@contextmanager
def running_fake():
    fake = Fake()
    fake.start()
    try:
        yield fake
    finally:
        fake.stop()


@pytest.fixture
def fake():
    """The server."""
    with running_fake() as server:
        yield server
