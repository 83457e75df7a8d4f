"""Storms of clients that leave (B-04, B-05), over the null executor: who stays gets each token once, nothing is left.

Engine, server and event loop are those of `oneloop serve`. Of a sequence that is cut what came is the beginning of what
it gets alone; a pool that is too small for all makes it be preempted meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.api.server import run_server
from oneloop.config import EngineConfig, ServerConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.engine.event_loop import turn_loop
from oneloop.engine.loop_times import LoopTimes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_BLOCKS = 160
SETTINGS = {
    "executor": "null", "null_step_ms": 1.0, "max_num_seqs": 64, "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": 2048,
}  # fmt: skip
AT_ONCE = 200
SETTLE_S = 5.0
WAYS = (
    "half a request",
    "at once",
    "in the queue or the prefill",
    "at a token",
    "before the end mark",
    "stays",
)
GOLDEN = 200
"""Requests that are compared before and after."""


@dataclass
class Tally:
    """What the clients did."""

    answered: int = 0
    """Whole replies."""
    cut: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))


def in_server_loop(work: Coroutine[Any, Any, None], times: LoopTimes) -> None:
    """Run it on the event loop that `oneloop serve` has."""
    with asyncio.Runner(loop_factory=turn_loop(times)) as runner:
        runner.run(work)


@asynccontextmanager
async def serving(times: LoopTimes, **settings: Any) -> AsyncIterator[tuple[AsyncEngine, int]]:
    """(engine, port)."""
    engine = AsyncEngine(EngineConfig.from_flat({**SETTINGS, **settings}), loop_times=times)
    sock, stop = socket.create_server(("127.0.0.1", 0), backlog=1024), asyncio.Event()
    async with engine:
        task = asyncio.create_task(run_server(engine, ServerConfig(shutdown_timeout=1.0), sock, stop))
        yield engine, sock.getsockname()[1]
        stop.set()
        await task


def body_of(number: int) -> dict[str, Any]:
    """The request of this number, always the same: what it gets depends on nothing else."""
    draw = random.Random(number)
    shared = "s" * draw.choice((0, 100, 300))  # some find others' blocks
    body = {"seed": number, "max_tokens": draw.randint(1, 150), "ignore_eos": True, "temperature": 1.0}
    if number % 3 == 0:
        return {**body, "messages": [{"role": "user", "content": f"{shared}{number}"}]}
    return {**body, "prompt": f"{shared}{number}" + "p" * draw.randint(0, 200)}


def message(body: dict[str, Any]) -> bytes:
    data, path = json.dumps(body).encode(), CHAT if "messages" in body else COMPLETIONS
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)


async def whole_reply(port: int, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """(text, usage) of a reply in one piece."""
    reader, writer = await connect(port)
    try:
        writer.write(message(body))
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        reply = json.loads(await reader.readexactly(length))
    finally:
        writer.close()
    choice = reply["choices"][0]
    return choice["message"]["content"] if "messages" in body else choice["text"], reply["usage"]


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Of a streamed reply, up to its end mark. EOFError when it ends before."""
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0] if event["choices"] else {"text": ""}
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def close(writer: asyncio.StreamWriter, *, with_reset: bool) -> None:
    if with_reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def leave(port: int, number: int, way: str, draw: random.Random) -> str:
    """A client that leaves in this way; returns the text that had come."""
    stream = number % 2 == 0
    request, text = message({**body_of(number), "stream": stream}), ""
    reader, writer = await connect(port)
    writer.write(request[: draw.randrange(len(request))] if way == "half a request" else request)
    if way == "in the queue or the prefill" or (not stream and way in ("at a token", "before the end mark")):
        await asyncio.sleep(draw.random() * 0.1)
    elif way in ("at a token", "before the end mark"):
        last = draw.randint(1, 100) if way == "at a token" else 1 << 20
        with suppress(EOFError):
            async for event in events(reader):
                text += text_of(event)
                last -= 1
                if not last or event["choices"][0]["finish_reason"] is not None:
                    break
    close(writer, with_reset=draw.random() < 0.5)
    return text


async def stay(port: int, number: int) -> tuple[str, dict[str, int]]:
    """(text, usage) of a client that reads to the end."""
    body = body_of(number)
    if number % 2:
        return await whole_reply(port, body)
    reader, writer = await connect(port)
    try:
        writer.write(message({**body, "stream": True, "stream_options": {"include_usage": True}}))
        seen = [event async for event in events(reader)]
    finally:
        writer.close()
    reasons = [event["choices"][0]["finish_reason"] for event in seen if event["choices"]]
    assert [reason for reason in reasons if reason is not None] == ["length"]
    return "".join(map(text_of, seen)), seen[-1]["usage"]


async def one_client(port: int, number: int, golden: dict[int, str], tally: Tally) -> None:
    """Whoever stays has each token once; whoever leaves had the first ones."""
    draw = random.Random(~number)
    way = draw.choice(WAYS)
    tally.cut[way] += 1
    key = number % GOLDEN
    if way != "stays":
        assert golden[key].startswith(await leave(port, key, way, draw))
        return
    text, usage = await stay(port, key)
    assert text == golden[key]
    assert usage["completion_tokens"] == body_of(key)["max_tokens"] == len(text)
    tally.answered += 1


async def audited(engine: AsyncEngine, done: asyncio.Event) -> None:
    """Check the core's conservation laws all along."""
    while not done.is_set():
        engine._loaded().core.audit()
        await asyncio.sleep(0.02)


async def at_rest(engine: AsyncEngine, limit_s: float) -> float:
    """Seconds until nothing runs and all blocks are back, without any request."""
    began = time.monotonic()
    while True:
        stats = engine.stats()
        is_empty = not (stats.num_running or stats.num_waiting or stats.num_used_blocks or engine._streams)
        if is_empty and not stats.num_steps_in_flight:
            break
        assert time.monotonic() - began < limit_s, stats
        await asyncio.sleep(0.01)
    engine._loaded().core.audit()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks == NUM_BLOCKS
    ended = stats.num_finished_stop + stats.num_finished_length + stats.num_aborted + stats.num_errored
    assert stats.num_submitted == ended
    assert stats.num_errored == 0
    return time.monotonic() - began


async def goldens(port: int) -> dict[int, str]:
    texts = {}
    for first in range(0, GOLDEN, 50):
        replies = await asyncio.gather(*[whole_reply(port, body_of(key)) for key in range(first, first + 50)])
        texts.update(enumerate((text for text, _ in replies), first))
    return texts


async def held() -> tuple[int, int]:
    """(descriptors, tasks) once connections that were closed are gone."""
    await asyncio.sleep(0.3)
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


async def storm(times: LoopTimes, num_requests: int) -> None:
    async with serving(times) as (engine, port):
        golden, tally, done = await goldens(port), Tally(), asyncio.Event()
        before, queued_before = await held(), engine.metrics.request_params_n.count
        auditing = asyncio.create_task(audited(engine, done))
        for first in range(0, num_requests, AT_ONCE):
            await asyncio.gather(
                *[one_client(port, first + number, golden, tally) for number in range(AT_ONCE)]
            )
        await at_rest(engine, SETTLE_S)
        done.set()
        await auditing
        assert await held() == before
        queued = engine.metrics.request_params_n.count
        assert sum(engine.metrics.request_success.values()) == queued, "received = finished + aborted"
        assert tally.answered <= queued - queued_before <= num_requests - tally.cut["half a request"]
        assert all(tally.cut.values())
        assert engine.metrics.request_success["abort"] > num_requests / 20
        assert await goldens(port) == golden
        assert engine.stats().num_preemptions > 0, "the pool was to be too small"


async def mass_cancel(times: LoopTimes, num_streams: int) -> None:
    async with serving(times, max_num_seqs=num_streams * 3 // 5) as (engine, port):
        body = {"prompt": "x" * 20, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        for attempt in range(2):
            pairs = await asyncio.gather(*[connect(port) for _ in range(num_streams)])
            for _, writer in pairs:
                writer.write(message(body))
            async with asyncio.timeout(20):
                while len(engine._streams) < num_streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await pairs[0][0].readuntil(b"data: ")
            stats = engine.stats()
            assert stats.num_running > 0
            assert stats.num_waiting > 0
            for _, writer in pairs:
                close(writer, with_reset=attempt == 0)
            await at_rest(engine, 2.0)
            assert engine.metrics.request_success["abort"] == num_streams * (attempt + 1)
        reader, writer = await connect(port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        shown = (await reader.read(-1)).decode()
        writer.close()
        for gauge in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "kv_blocks_used",
        ):
            assert f'oneloop:{gauge}{{engine="0",model_name="null"}} 0.0' in shown, gauge


@pytest.mark.parametrize(
    "num_requests", [800, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_abort_storm(num_requests: int) -> None:
    """B-04: 200 clients at a time leave in every way; books balance at every moment, and texts are whole."""
    times = LoopTimes()
    in_server_loop(storm(times, num_requests), times)


@pytest.mark.parametrize("num_streams", [200, pytest.param(500, marks=pytest.mark.slow)])
def test_mass_cancel(num_streams: int) -> None:
    """B-05: all streams are cut at once, by RST and then by FIN, and nobody asks for anything: gauges read 0 in 2 s."""
    times = LoopTimes()
    in_server_loop(mass_cancel(times, num_streams), times)
