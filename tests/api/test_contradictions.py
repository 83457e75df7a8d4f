"""What a request asks of its answer's tokens may leave none of them, or need too much work.

Its own client is told which field is at fault, with 400, wherever the answer stands. Over the null executor, whose
tokens are bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

YES = {"structured_outputs": {"choice": ["yes"]}}
CHOICE = "structured_outputs.choice"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
A, Y, END = ord("A"), ord("y"), 257
LARGE_TERMINAL = "start: A\nA: B B B B\nB: C C C C\nC: D D D D\nD: E{1,1000}\nE: /[a-z]{1,1000}/"
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({**YES, "allowed_token_ids": [A]}, CHOICE),
    ({**YES, "allowed_token_ids": [Y]}, CHOICE),
    ({**YES, "bad_words": ["y"]}, CHOICE),
    ({**YES, "bad_words": ["es"]}, CHOICE),
    ({**YES, "stop_token_ids": [Y], "min_tokens": 2}, CHOICE),
    ({"guided_choice": ["yes"], "allowed_token_ids": [A]}, "guided_choice"),
    ({"structured_outputs": {"grammar": LARGE_TERMINAL}, "max_tokens": 400}, "structured_outputs.grammar"),
    ({"allowed_token_ids": [END], "min_tokens": 5}, "allowed_token_ids"),
    ({"allowed_token_ids": [A, Y], "stop_token_ids": [A, Y], "min_tokens": 4}, "allowed_token_ids"),
    ({"tools": TOOLS, "tool_choice": "required", "allowed_token_ids": [A]}, "tools"),
]
"""Fields of a chat, and the one that is named. Some are found at the first token, others behind it."""
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture
async def server(serve: Any) -> AsyncIterator[Any]:
    config = EngineConfig.from_flat({"executor": "null", "max_num_seqs": 16, "max_num_batched_tokens": 64})
    async with AsyncEngine(config) as engine, serve(engine, tool_call_parser="hermes") as served:
        yield served


async def last_event(server: Any, path: str, body: dict[str, Any]) -> Any:
    """The last object of a stream, or of the reply that came instead of one."""
    async with server.session.post(server.url + path, json={**body, "stream": True}) as reply:
        text = await reply.text()
    if reply.status != 200:
        assert reply.status == 400
        return json.loads(text)
    return json.loads([line for line in text.splitlines() if line.startswith("data: ")][-1][len("data: ") :])


def check(error: Any, field: str) -> None:
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", field, 400)
    assert error["message"].startswith(f"{field}: the answer could not go on (")
    assert "loosen" in error["message"]


@pytest.mark.parametrize(("fields", "named"), CONTRADICTIONS, ids=lambda value: str(value)[:70])
async def test_the_field_is_named(
    server: Any, fields: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/v1/chat/completions"
    beside = asyncio.create_task(server.post(path, {**ASK, "max_tokens": 200, "ignore_eos": True}))
    status, reply = await server.post(path, {**ASK, **fields})
    assert status == 400
    check(reply["error"], named)
    check((await last_event(server, path, {**ASK, **fields}))["error"], named)
    status, reply = await server.post(path, {**ASK, **fields, "n": 3})
    assert status == 400
    check(reply["error"], named)
    status, reply = await beside
    assert (status, reply["usage"]["completion_tokens"]) == (200, 200)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_in_the_other_protocols(server: Any) -> None:
    fields = {**YES, "allowed_token_ids": [Y]}
    status, reply = await server.post("/v1/messages", {**ASK, **fields})
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["message"].startswith(f"{CHOICE}: ")
    event = await last_event(server, "/v1/messages", {**ASK, **fields})
    assert (event["type"], event["error"]["type"]) == ("error", "invalid_request_error")
    body = {"input": "hi", "max_output_tokens": 8, **fields}
    status, reply = await server.post("/v1/responses", body)
    assert status == 400
    check(reply["error"], CHOICE)
    failed = (await last_event(server, "/v1/responses", body))["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
    assert failed["error"]["message"].startswith(f"{CHOICE}: ")
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 8, **fields}}
    status, reply = await server.post("/inference/v1/generate", body)
    assert status == 400
    assert reply["error"]["param"].endswith(CHOICE)


async def test_in_the_background(server: Any) -> None:
    body = {"input": "hi", "max_output_tokens": 8, "background": True, **YES, "allowed_token_ids": [Y]}
    status, reply = await server.post("/v1/responses", body)
    assert (status, reply["status"]) == (200, "in_progress")
    async with asyncio.timeout(10):
        while reply["status"] == "in_progress":
            await asyncio.sleep(0.01)
            async with server.session.get(f"{server.url}/v1/responses/{reply['id']}") as got:
                reply = await got.json()
    assert (reply["status"], reply["error"]["code"]) == ("failed", "invalid_prompt")


async def test_over_the_socket(server: Any) -> None:
    body = {**ASK, **YES, "allowed_token_ids": [Y]}
    async with server.session.ws_connect(server.url + "/v1/stream") as socket:
        await socket.send_json({"type": "open", "id": "a", "endpoint": "chat", "body": body})
        told = [await socket.receive_json()]
        while told[-1]["type"] in ("opened", "delta"):
            told.append(await socket.receive_json())
    assert (told[-1]["type"], told[-1]["id"]) == ("error", "a")
    check(told[-1]["error"], CHOICE)


async def test_beams_are_not_bound_by_calls_either(server: Any) -> None:
    body = {**ASK, "tools": TOOLS, "tool_choice": "required", "use_beam_search": True, "n": 2}
    status, reply = await server.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "use_beam_search")
    assert reply["error"]["message"].startswith("use_beam_search ")


async def test_what_the_core_refuses_has_the_clients_name(server: Any) -> None:
    status, reply = await server.post("/v1/chat/completions", {**ASK, "use_beam_search": True, "n": 64})
    assert (status, reply["error"]["param"]) == (400, "n")
    status, reply = await server.post("/v1/chat/completions", {**ASK, "use_beam_search": True, "n": 15})
    assert status == 200
    body = {**ASK, "use_beam_search": True, "n": 15, "stop_token_ids": list(range(9))}
    status, reply = await server.post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "use_beam_search")
    assert reply["error"]["message"].startswith("use_beam_search: ")
