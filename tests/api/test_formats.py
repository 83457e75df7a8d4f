"""Messages and Responses over the model's own formats of thinking and calls: whole and streamed tell the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

TEMPLATE = '<tool_call> {"name", "arguments"} </tool_call> <think> </think>'
"""What the formats are recognised by."""
SCRIPT = (
    "<think>\nlet me see 日本\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
NAMES = ("get", "now")


@pytest.fixture
async def thinking(serve: Any, fake_engine_type: Any, fake_tokenizer_type: Any) -> Any:
    """A model that thinks and calls."""
    tokenizer = fake_tokenizer_type(template=TEMPLATE)
    engine = fake_engine_type(tokenizer=tokenizer, script=SCRIPT)
    engine.in_step = True
    async with serve(engine) as served:
        yield served


async def messages(server: Any, rules: Any, **members: Any) -> list[dict[str, Any]]:
    """Whole and streamed."""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
    asked = {"max_tokens": 230, "messages": [{"role": "user", "content": "x"}], "tools": tools, **members}
    status, whole = await server.post("/v1/messages", asked)
    assert status == 200, whole
    async with server.session.post(server.url + "/v1/messages", json={**asked, "stream": True}) as reply:
        return [whole, rules.AnthropicRules.check(rules.named_events(await reply.read()))]


async def responses(server: Any, rules: Any, **members: Any) -> list[dict[str, Any]]:
    """Whole and streamed."""
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
    asked = {"input": "x", "tools": tools, **members}
    status, whole = await server.post("/v1/responses", asked)
    assert status == 200, whole
    async with server.session.post(server.url + "/v1/responses", json={**asked, "stream": True}) as reply:
        return [whole, rules.ResponsesRules.check(rules.named_events(await reply.read()))]


async def test_messages(thinking: Any, rules: Any) -> None:
    for reply in await messages(thinking, rules):
        thought, text, first, second = reply["content"]
        assert thought["thinking"] == "let me see 日本"
        assert text == {"type": "text", "text": "I look."}
        assert (first["name"], first["input"], second["name"], second["input"]) == (
            "get", {"city": "Köln"}, "now", {},
        )  # fmt: skip
        assert first["id"] != second["id"]
        assert reply["stop_reason"] == "tool_use"


async def test_responses(thinking: Any, rules: Any) -> None:
    for reply in await responses(thinking, rules):
        thought, message, first, second = reply["output"]
        assert thought["content"][0]["text"] == "let me see 日本"
        assert message["content"][0]["text"] == "I look."
        assert (first["name"], json.loads(first["arguments"])) == ("get", {"city": "Köln"})
        assert (second["name"], json.loads(second["arguments"])) == ("now", {})
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
            SCRIPT.split("</think>", 1)[0].encode() + b"</think>"
        )


async def test_one_call_at_a_time(thinking: Any, rules: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for reply in await messages(thinking, rules, tool_choice=choice):
        assert [block["name"] for block in reply["content"] if block["type"] == "tool_use"] == ["get"]
    for reply in await responses(thinking, rules, parallel_tool_calls=False):
        assert [item["name"] for item in reply["output"] if item["type"] == "function_call"] == ["get"]


async def test_no_calls_are_wanted(thinking: Any, rules: Any) -> None:
    for reply in await messages(thinking, rules, tool_choice={"type": "none"}):
        assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
        assert "<tool_call>" in reply["content"][1]["text"]
        assert reply["stop_reason"] == "end_turn"


async def test_a_call_must_be_possible(server: Any) -> None:
    tools = [{"name": "get", "input_schema": {"type": "object"}}]
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    status, reply = await server.post("/v1/messages", asked)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "--tool-call-parser" in reply["error"]["message"]
