"""A tiny Llama with random weights, in transformers and as a folder that the engine loads."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers

from oneloop import LLM
from oneloop.api.server import run_server
from oneloop.config import EngineConfig, ServerConfig
from oneloop.engine.async_engine import AsyncEngine

BLOCK_SIZE = 16
EOS = 257


@dataclass(frozen=True)
class Twin:
    """One model twice."""

    folder: Path
    model: Any
    """transformers', float32."""

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens - 1, vocabulary]: row i is about token i + 1."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1]
        return logits.log_softmax(-1)

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, hidden_size] behind the final norm."""
        with torch.inference_mode():
            return self.model.model(torch.tensor([token_ids])).last_hidden_state[0]


@pytest.fixture(scope="session")
def twin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    folder = tmp_path_factory.mktemp("twin")
    for path in tiny_model.iterdir():
        shutil.copy(path, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # peaked enough that the order of tokens is no accident
        weight.data.mul_(2.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return Twin(folder, model)


@pytest.fixture(scope="session")
def make_llm(twin: Twin) -> Any:
    """An LLM over the twin."""

    def make(**settings: Any) -> LLM:
        sizes = {
            "dtype": "float32",
            "num_gpu_blocks_override": 256,
            "block_size": BLOCK_SIZE,
            "device": "cpu",
        }
        return LLM(str(twin.folder), use_tqdm=False, **{**sizes, **settings})

    return make


class Server:
    """A real engine over the twin, served."""

    def __init__(self, url: str, session: aiohttp.ClientSession, engine: AsyncEngine) -> None:
        self.url = url
        self.session = session
        self.engine = engine

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, JSON) of a POST."""
        async with self.session.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json(content_type=None)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The JSON of each event but the end mark."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as reply:
            assert reply.status == 200, await reply.text()
            text = (await reply.read()).decode()
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


@pytest.fixture
async def server(twin: Twin) -> AsyncIterator[Server]:
    settings = {
        "model": str(twin.folder), "served_model_name": ("twin",), "dtype": "float32", "device": "cpu",
        "num_gpu_blocks_override": 256, "block_size": BLOCK_SIZE, "max_num_seqs": 16,
    }  # fmt: skip
    sock = socket.create_server(("127.0.0.1", 0))
    stop = asyncio.Event()
    engine = AsyncEngine(EngineConfig.from_flat(settings))
    await engine.start()
    serving = asyncio.create_task(run_server(engine, ServerConfig(shutdown_timeout=1.0), sock, stop))
    async with aiohttp.ClientSession() as session:
        yield Server(f"http://127.0.0.1:{sock.getsockname()[1]}", session, engine)
    stop.set()
    await serving
    await engine.shutdown()
