"""Samples at a high temperature for ten schemas, over HTTP: what ended by itself is valid, streamed as whole.

Over the null executor every token that the masks allow is as likely as any other: no model strays so far. The embedded
model is what people ask. `make test-slow` draws 200 of each schema, CI a few.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop_bench.schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT = "/v1/chat/completions"
AT_ONCE = 64
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for name, schema in SCHEMAS.items()
}


def body(name: str, seed: int, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}
    question = f"Give me an example of one {name}, number {seed}, as JSON."
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 1.5, "seed": seed, "response_format": form, **fields}


async def whole(server: Any, asked: dict[str, Any]) -> tuple[str, str]:
    """(text, finish reason)."""
    status, answer = await server.post(CHAT, asked)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def streamed(server: Any, asked: dict[str, Any]) -> tuple[str, str]:
    """(text, finish reason)."""
    *events, end = await server.stream(CHAT, asked)
    assert end == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), reason


async def all_of(work: Sequence[Any]) -> list[Any]:
    """What coroutines return, not too many running at once."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(coroutine: Any) -> Any:
        async with room:
            return await coroutine

    return await asyncio.gather(*map(one, work))


def check(name: str, answers: Sequence[tuple[str, str]]) -> int:
    """Every answer that ended by itself is valid, the others ran into their limit; how many ended."""
    ended = [text for text, reason in answers if reason == "stop"]
    assert all(reason in ("stop", "length") for _, reason in answers)
    for text in ended:
        VALIDATORS[name].validate(json.loads(text))
    print(f"{name}: {len(ended)} of {len(answers)} ended, all valid", flush=True)
    return len(ended)


@pytest.mark.held_at_most(0.5)  # loading a tokenizer, which nobody waits for
@pytest.mark.parametrize(
    "num_samples", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_random_tokens_keep_to_their_schema(serve: Any, num_samples: int) -> None:
    sizes = {"max_num_seqs": AT_ONCE, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    config = EngineConfig.from_flat({"model": "smollm2", "executor": "null", **sizes})
    async with AsyncEngine(config) as engine, serve(engine) as server:
        num_ended = {}
        for name in SCHEMAS:
            asked = [body(name, seed, max_tokens=1024) for seed in range(num_samples)]
            at_once = await all_of([whole(server, one) for one in asked])
            assert await all_of([streamed(server, {**one, "stream": True}) for one in asked]) == at_once
            num_ended[name] = check(name, at_once)
        assert min(num_ended.values()) > 0, num_ended
        assert sum(num_ended.values()) > 6 * num_samples, num_ended


@pytest.mark.held_at_most(60)  # steps of the model are computed on the loop's thread
@pytest.mark.parametrize(
    ("num_samples", "max_tokens"),
    [(2, 64), pytest.param(200, 96, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
async def test_a_model_keeps_to_its_schema(serve: Any, num_samples: int, max_tokens: int) -> None:
    sizes = {"max_num_seqs": AT_ONCE, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 30}
    config = EngineConfig.from_flat({"model": "smollm2", "device": "cpu", "dtype": "float32", **sizes})
    async with AsyncEngine(config) as engine, serve(engine) as server:
        num_ended = 0
        for name in SCHEMAS:
            asked = [body(name, seed, max_tokens=max_tokens) for seed in range(num_samples)]
            work = [
                streamed(server, {**one, "stream": True}) if place % 2 else whole(server, one)
                for place, one in enumerate(asked)
            ]
            num_ended += check(name, await all_of(work))
        assert num_ended > len(SCHEMAS) * num_samples // 4
