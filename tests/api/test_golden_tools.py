"""The bytes of replies with calls and thinking. A missing file is written and fails once: look at it, commit it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden")
TEMPLATE = '<tool_call>{"name": …, "arguments": …}</tool_call><think></think>'
SCRIPT = (
    "<think>\nZürich?\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "get_time"}</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
BODY = {"messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
USAGE = {"stream_options": {"include_usage": True}}
CASES = {
    "chat_tools.json": BODY,
    "chat_tools.sse": {**BODY, **USAGE, "stream": True},
    "chat_thinking_cut.json": {**BODY, "max_tokens": 12},
    "chat_thinking_cut.sse": {**BODY, **USAGE, "stream": True, "max_tokens": 12},
}


def normalised(body: bytes) -> bytes:
    body = re.sub(rb'"created":\d{10,}', b'"created":0', body)
    body = re.sub(rb'"call_[0-9a-f]{32}"', b'"call_X"', body)
    return re.sub(rb'"system_fingerprint":"oneloop-[^"]+"', b'"system_fingerprint":"oneloop-X"', body)


@pytest.mark.parametrize("name", CASES)
async def test_wire_bytes(serve: Any, fake_engine_type: Any, name: str) -> None:
    tokenizer = type(fake_engine_type().tokenizer)((), TEMPLATE)
    engine = fake_engine_type(tokenizer=tokenizer, script=SCRIPT, max_model_len=1024)
    engine.in_step = True
    async with serve(engine) as server:
        headers = {"X-Request-Id": "golden"}
        async with server.session.post(
            server.url + "/v1/chat/completions", json=CASES[name], headers=headers
        ) as reply:
            assert reply.status == 200
            found = normalised(await reply.read())
    file = GOLDEN / name
    if not file.exists():
        file.write_bytes(found)
        pytest.fail(f"{name} was missing; it is written now: look at it")
    assert found == file.read_bytes()
