"""A real server under clients that leave in every way and under a pool that is far too small (B-04, B-12, H03).

Whatever else runs, an answer is the one the request gets alone; afterwards nothing is left over. The model is tiny but
has weights of ordinary size, so that one wrong KV block changes the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_BLOCKS = 40
OPTIONS = [
    "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
    "--scheduling-policy", "priority",
]  # fmt: skip
CANARY = {"prompt": "canary", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
START_LIMIT_S, SETTLE_LIMIT_S = 60, 5
MAX_GROWTH_MIB = 64
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, zero seconds: closing sends RST."""


def write_weights(folder: Path) -> None:
    """Weights for the tiny configuration, large enough that every token of the context matters."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {at + f"self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {at + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {at + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    source = torch.Generator().manual_seed(7)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=source) * 0.3
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")


class Server:
    """The running process, its counters, and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.session: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any]) -> tuple[list[tuple[str, str]], dict[str, int]]:
        """[(text, finish reason) per choice], usage; streamed where the body says so."""
        body = {**body, "stream_options": {"include_usage": True}} if body.get("stream") else body
        async with self.session.post(self.url + COMPLETIONS, json=body) as reply:
            data = await reply.read()
            assert reply.status == 200, data
        if not body.get("stream"):
            answer = json.loads(data)
            choices = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
            return choices, counts(answer["usage"])
        events = [json.loads(event) for event in data.decode().replace("data: ", "").split("\n\n")[:-2]]
        texts, reasons = [""] * body["n"], [""] * body["n"]
        for choice in (choice for event in events for choice in event["choices"]):
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
        return list(zip(texts, reasons, strict=True)), counts(events[-1]["usage"])

    async def gauges(self) -> dict[str, float]:
        """The engine's metrics without labels that have one value each."""
        async with self.session.get(self.url + "/metrics") as reply:
            text = await reply.text()
        return {
            name: float(value)
            for name, value in re.findall(r"^oneloop:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        }

    async def settled(self) -> dict[str, float]:
        """The gauges, once nothing runs, waits or holds a block. Fails after SETTLE_LIMIT_S."""
        begin = time.monotonic()
        while True:
            gauges = await self.gauges()
            busy = {
                name: gauges[name]
                for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
                if gauges[name]
            }
            if not busy:
                return gauges
            assert time.monotonic() - begin < SETTLE_LIMIT_S, busy
            await asyncio.sleep(0.02)

    def num_files(self) -> int:
        """Open file descriptors of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_mib(self) -> float:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """What usage says apart from the cache, which depends on what ran before."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.fixture(scope="module")
def process(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a pool of 40 blocks."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(tiny_model, folder)
    write_weights(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder.parent / "log"
    command = [sys.executable, "-m", "oneloop.cli.main", "serve", str(folder), "--port", str(port), *OPTIONS]
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as child:
        try:
            wait_ready(child, port)
            yield Server(child, port, log)
        finally:
            child.terminate()
            assert child.wait(15) == 0


def wait_ready(child: subprocess.Popen[bytes], port: int) -> None:
    """Until /health answers 200."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert child.poll() is None, "the server has ended"
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return
        time.sleep(0.05)
    pytest.fail("the server is never ready")


@pytest.fixture
async def server(process: Server) -> AsyncIterator[Server]:
    """Afterwards: the same canary, no request, no block and no file left over, nothing in the log above INFO."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        process.session = session
        canary = await process.ask(CANARY)
        before, files, rss = await process.settled(), process.num_files(), process.rss_mib()
        yield process
        after = await process.settled()
        assert await process.ask(CANARY) == canary
        assert after["kv_blocks_free"] + after["kv_blocks_cached"] == NUM_BLOCKS
        assert len(after) == len(before)
        assert abs(process.num_files() - files) <= 3
        assert process.rss_mib() - rss < MAX_GROWTH_MIB
        async with session.get(process.url + "/health") as reply:
            assert reply.status == 200
    assert not re.search(r"WARNING|ERROR|CRITICAL|Traceback", process.log.read_text())


def mixed_requests(source: random.Random, num: int) -> list[dict[str, Any]]:
    """Greedy and seeded, alone and forked, with a shared prefix or not; only a stop string ends one early."""
    requests = []
    for number in range(num):
        prompt = ("shared prefix " * 6 if source.random() < 0.5 else "") + f"{number} " * source.randint(
            1, 20
        )
        request: dict[str, Any] = {
            "prompt": prompt, "max_tokens": source.randint(40, 180), "n": source.choice([1, 1, 1, 2, 4]),
            "temperature": source.choice([0, 0, 1]), "seed": number, "ignore_eos": True,
            "priority": source.randint(-1, 1), "stream": source.random() < 0.5,
        }  # fmt: skip
        if source.random() < 0.2:
            request["stop"] = ["e", "ab", "\n"]
        if source.random() < 0.2:
            request |= {"repetition_penalty": 1.3, "logit_bias": {"40": -100, "50": 3}}
        if source.random() < 0.2:
            request["logprobs"] = 3
        requests.append(request)
    return requests


async def test_starved_pool_changes_no_answer(server: Server) -> None:
    """Eight at once may need 130 blocks and there are 40: some are preempted, all answer as they do alone."""
    requests = mixed_requests(random.Random(5), 28)
    alone = [await server.ask(request) for request in requests]
    before = (await server.gauges())["num_preemptions_total"]
    together = await asyncio.gather(*(server.ask(request) for request in requests))
    for request, expected, got in zip(requests, alone, together, strict=True):
        assert got == expected, request
    assert (await server.gauges())["num_preemptions_total"] > before + 10


async def leave(server: Server, source: random.Random) -> None:
    """Ask for much, read a little or nothing, and go: by FIN or RST, at any point of the request or of the reply."""
    body = json.dumps(
        {
            "prompt": "leaving " * source.randint(1, 20), "max_tokens": 300, "n": source.choice([1, 2, 4]),
            "ignore_eos": True, "stream": source.random() < 0.7, "priority": source.randint(-1, 1),
        }
    ).encode()  # fmt: skip
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    await asyncio.sleep(source.random() * 3)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    whole = head + body
    writer.write(whole if source.random() < 0.8 else whole[: source.randrange(len(whole))])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(source.random()):
            for _ in range(source.randint(0, 8)):
                await reader.read(256)
    if source.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()


async def test_clients_that_leave_take_nothing_with_them(server: Server) -> None:
    """200 of them in three seconds; those that stay get the answers they get alone."""
    source = random.Random(6)
    requests = [{**request, "priority": -2} for request in mixed_requests(source, 12)]
    alone = [await server.ask(request) for request in requests]
    leaving = asyncio.gather(*(leave(server, source) for _ in range(200)))
    assert await asyncio.gather(*(server.ask(request) for request in requests)) == alone
    await leaving
