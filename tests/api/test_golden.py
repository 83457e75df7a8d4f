"""The bytes of replies as they are on the wire. A missing file is written and fails once: look at it, commit it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden")
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 日本"}]
CHAT = {"messages": HELLO, "max_tokens": 12, "seed": 11}
COMPLETION = {"prompt": "hello", "max_tokens": 12, "seed": 4}
USAGE = {"include_usage": True}

CASES = {
    "chat.json": ("/v1/chat/completions", CHAT),
    "chat.sse": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat_usage_n2.sse": ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "stream_options": USAGE}),
    "chat_continuous.sse": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": True,
            "max_tokens": 4,
            "stream_options": {"continuous_usage_stats": True, **USAGE},
        },
    ),
    "chat_logprobs.json": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_logprobs.sse": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2},
    ),
    "chat_stop.sse": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 200, "stream": True, "stop": ["three", "語"]},
    ),
    "completion.json": ("/v1/completions", COMPLETION),
    "completion.sse": ("/v1/completions", {**COMPLETION, "stream": True}),
    "completion_echo_n2.sse": (
        "/v1/completions",
        {**COMPLETION, "stream": True, "n": 2, "echo": True, "stream_options": USAGE},
    ),
    "completion_logprobs.json": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "completion_logprobs.sse": ("/v1/completions", {**COMPLETION, "logprobs": 2, "stream": True}),
    "completion_nothing.sse": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": 0, "echo": True, "stream": True},
    ),
    "tokenize.json": ("/tokenize", {"prompt": "a é", "return_token_strs": True}),
    "tokenize_chat.json": ("/tokenize", {"messages": HELLO}),
    "detokenize.json": ("/detokenize", {"tokens": [256, 104, 105, 257]}),
}


def normalised(body: bytes) -> bytes:
    body = re.sub(rb'"created":\d{10,}', b'"created":0', body)
    return re.sub(rb'"system_fingerprint":"oneloop-[^"]+"', b'"system_fingerprint":"oneloop-X"', body)


@pytest.mark.parametrize("name", CASES)
async def test_wire_bytes(scripted: Any, name: str) -> None:
    path, body = CASES[name]
    scripted.engine.in_step = True
    async with scripted.session.post(
        scripted.url + path, json=body, headers={"X-Request-Id": "golden"}
    ) as reply:
        assert reply.status == 200
        found = normalised(await reply.read())
        headers = reply.headers
    assert headers["X-Request-Id"] == "golden"
    if name.endswith(".sse"):
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert headers["Cache-Control"] == "no-cache"
        assert headers["X-Accel-Buffering"] == "no"
    else:
        assert headers["Content-Type"] == "application/json"
    file = GOLDEN / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(found)
        pytest.fail(f"{name} was missing and is written now")
    assert found == file.read_bytes()
