"""POST /v1/requests/{request_id}/control over the double of the engine."""
# ruff: noqa: ASYNC110  (tables; polling)

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "stream": True}
STARTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 200, "stream": True}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "hello", "stream": True}),
]
TOKENS: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 200}, "stream": True}
STARTS += [
    ("/inference/v1/generate", TOKENS),
    *(("/inference/v1/generate", {**TOKENS, "request_id": name}) for name in ("mine", "chatcmpl-mine")),
    *(
        (path, {**body, "request_id": name})
        for path, body in STARTS
        for name in ("mine", "cmpl-mine", "msg_mine")
    ),
]


async def control(server: Any, name: str, **body: Any) -> tuple[int, Any]:
    status, reply = await server.post(f"/v1/requests/{name}/control", body)
    return status, reply


def id_in(path: str, events: bytes) -> str:
    """The reply's id, from its first event."""
    data = json.loads(events.split(b"data: ", 1)[1].split(b"\n", 1)[0])
    if path == "/inference/v1/generate":
        return str(data["request_id"])
    member = {"/v1/messages": "message", "/v1/responses": "response"}.get(path)
    return str(data["id"] if member is None else data[member]["id"])


@pytest.mark.parametrize("by", ["header", "reply"])
@pytest.mark.parametrize(("path", "body"), STARTS, ids=lambda value: str(value)[-30:])
async def test_cancelling(scripted: Any, path: str, body: dict[str, Any], by: str) -> None:
    scripted.engine.step_s, scripted.engine.script = 0.005, "x" * 300
    async with scripted.session.post(scripted.url + path, json=body) as reply:
        first = await reply.content.readuntil(b"\n\n")
        name = reply.headers["X-Request-Id"] if by == "header" else id_in(path, first)
        status, answer = await control(scripted, name, action="cancel")
        assert (status, answer) == (200, {"id": name, "action": "cancel", "done": True})
        rest = (await reply.read()).decode()
    await scripted.settled()
    end = {"/v1/messages": '"pause_turn"', "/v1/responses": '"cancelled"'}.get(
        path, '"finish_reason":"abort"'
    )
    assert end in rest
    assert scripted.engine.generated < 200
    assert (await control(scripted, name, action="cancel"))[0] == 404


async def test_a_reply_that_is_not_streamed_ends_too(server: Any) -> None:
    server.engine.paused.clear()
    headers = {"X-Request-Id": "mine"}
    asked = asyncio.create_task(
        server.post("/v1/chat/completions", {**CHAT, "stream": False}, headers=headers)
    )
    async with asyncio.timeout(5):
        while (await control(server, "mine", action="cancel"))[0] == 404:
            await asyncio.sleep(0.01)
    status, reply = await asked
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "abort")


async def test_priorities(serve: Any, null_engine_type: Any) -> None:
    async with serve(null_engine_type(scheduling_policy="priority")) as server:
        server.engine.paused.clear()
        background = {"input": "x", "background": True}
        reply = (await server.post("/v1/responses", background, headers={"X-Request-Id": "mine"}))[1]
        for name, priority in (("mine", -3), (reply["id"], 4)):
            assert (await control(server, name, action="set_priority", priority=priority))[0] == 200
            view = server.engine.scheduler_view()
            assert [each["priority"] for each in (*view["running"], *view["waiting"])] == [priority]


async def test_what_cannot_be_done(server: Any) -> None:
    server.engine.paused.clear()
    await server.post("/v1/responses", {"input": "x", "background": True}, headers={"X-Request-Id": "mine"})
    for body, param in (
        ({"action": "set_priority", "priority": 1}, "priority"),  # the policy has none
        ({"action": "end_thinking"}, "action"),  # no thinking
        ({"action": "set_priority"}, "priority"),
        ({"action": "set_priority", "priority": 2**70}, "priority"),
        ({"action": "set_priority", "priority": "1"}, "priority"),
        ({"action": "cancel", "priority": 1}, "priority"),
        ({"action": "x"}, "action"),
        ({"action": ["cancel"]}, "action"),
        ({}, "action"),
    ):
        status, reply = await control(server, "mine", **body)
        assert (status, reply["error"]["param"]) == (400, param), body
    assert server.engine.num_live("mine") == 1
    assert (await control(server, "other", action="cancel"))[0] == 404
    assert (await control(server, "resp_" + "0" * 32, action="cancel"))[0] == 404
