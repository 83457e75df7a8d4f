"""A server on a free port, and clients that see raw bytes.

Its engine is the product's over the null executor (null_engine.py). A double of the engine (fake_engine.py, fixtures
`scripted` and `fake_engine_type`) writes from a script where a test needs what that cannot give: steps that wait until
each was read, so that bytes can be compared event by event (test_golden, the express lane beside aiohttp, streams
beside whole replies); steps that fail, an engine that is overloaded or dead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from oneloop.api.peers import watch_peers
from oneloop.api.server import run_server
from oneloop.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def _load(name: str) -> Any:
    """A helper module beside this file (the tests' folders are no packages)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake = _load("fake_engine")
null = _load("null_engine")
event_rules = _load("event_rules")


class Served:
    """A running server and how to reach it."""

    def __init__(self, engine: Any, config: ServerConfig, sock: socket.socket) -> None:
        self.engine = engine
        self.config = config
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.stop = asyncio.Event()
        self.session: aiohttp.ClientSession
        self.task: asyncio.Task[None]

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """(status, JSON) of a POST."""
        async with self.session.post(self.url + path, json=body, **options) as reply:
            return reply.status, await reply.json(content_type=None)

    async def post_raw(self, path: str, data: bytes, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a POST of these bytes as JSON."""
        sent = {"Content-Type": "application/json", **headers}
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=sent) as reply:
            return reply.status, await reply.json(content_type=None)

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        """(status, text) of a GET."""
        async with self.session.get(self.url + path, **options) as reply:
            return reply.status, await reply.text()

    async def stream(self, path: str, body: Any) -> list[str]:
        """The data of each event of a streamed reply."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            return events_of(await reply.read())

    async def raw(self, data: bytes, *, wait_s: float = 3.0) -> bytes:
        """Everything the server answers to these bytes on a connection of their own, until it closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            writer.write(data)
            async with asyncio.timeout(wait_s):
                while piece := await reader.read(1 << 16):
                    answer += piece
        except ConnectionResetError:
            pass  # it closed while more was on its way
        finally:
            writer.close()
        return answer

    async def settled(self) -> None:
        """Wait until the engine has nothing to do."""
        async with asyncio.timeout(5):
            while self.engine.live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def events_of(body: bytes) -> list[str]:
    """Split an SSE body, checking its framing."""
    text = body.decode()
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks]


@asynccontextmanager
async def serving(engine: Any = None, **settings: Any) -> AsyncIterator[Served]:
    """Serve an engine until the block ends. None: one over the null executor; such a one is started here."""
    engine = engine or null.NullEngine()
    if isinstance(engine, null.NullEngine):
        await engine.start()
    sock = socket.create_server(("127.0.0.1", 0))
    config = ServerConfig(**{"shutdown_timeout": 1.0, **settings})
    watch_peers(sock, config.write_timeout_s)
    served = Served(engine, config, sock)
    served.task = asyncio.create_task(run_server(served.engine, config, sock, served.stop))
    # pytest ends what hangs; a slow machine must not look as if something did.
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600)) as session:
        served.session = session
        try:
            yield served
        finally:
            if isinstance(engine, null.NullEngine):
                engine.paused.set()
            served.stop.set()
            await served.task


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    """A server with default settings."""
    async with serving() as served:
        yield served


@pytest.fixture
def serve() -> Any:
    """`serving`, for tests that choose their own settings."""
    return serving


@pytest.fixture
async def scripted() -> AsyncIterator[Served]:
    """The same over the double."""
    async with serving(fake.FakeEngine()) as served:
        yield served


@pytest.fixture
def null_engine_type() -> Any:
    """NullEngine, for tests that choose its settings."""
    return null.NullEngine


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """Makes NullEngine's tokenizer; outside of event loops."""
    return null.byte_tokenizer


@pytest.fixture
def rules() -> Any:
    """Module `event_rules`."""
    return event_rules


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are in the format of `event_rules.MarkedParser`."""
    for place in ("oneloop.api.anthropic.handler", "oneloop.api.responses.prepare"):
        monkeypatch.setattr(f"{place}.parsing_of", lambda *_, **__: None)
        monkeypatch.setattr(f"{place}.block_source", lambda *_: event_rules.MarkedParser())


@pytest.fixture
async def roomy() -> AsyncIterator[Served]:
    """The double with a context of 4096."""
    engine = fake.FakeEngine()
    engine.model_info = replace(engine.model_info, max_model_len=4096)
    async with serving(engine) as served:
        yield served


@pytest.fixture
def fake_engine_type() -> Any:
    """FakeEngine, for tests that prepare one."""
    return fake.FakeEngine


@pytest.fixture
def fake_tokenizer_type() -> Any:
    """FakeTokenizer, for tests that choose its marks and its template."""
    return fake.FakeTokenizer
