"""The bytes of replies as they are on the wire, of every endpoint (chat with calls and thinking: test_golden_tools.py).

A missing file is written and fails once: look at it, commit it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden")
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 日本"}]
CHAT = {"messages": HELLO, "max_tokens": 12, "seed": 11}
COMPLETION = {"prompt": "hello", "max_tokens": 12, "seed": 4}
USAGE = {"include_usage": True}
CLAUDE = {"messages": HELLO[1:], "system": "be brief", "max_tokens": 12, "seed": 11}
RESPONSES = {"input": HELLO, "max_output_tokens": 12, "seed": 11}

NAMED = {"logprob_token_ids": [101, 7]}
TOLD_BACK = {"return_token_ids": True, "return_prompt_text": True, "return_token_offsets": True}
GENERATE = "/inference/v1/generate"
GENERATED = {
    "request_id": "chatcmpl-golden",
    "choices": [
        {"index": 0, "token_ids": [104, 230, 151, 165, 257], "finish_reason": "stop", "logprobs": None}
    ],
}
GENERATED_CHUNK = {
    **GENERATED,
    "choices": [{"index": 0, "token_ids": [104, 230, 151], "finish_reason": None}],
}

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
    "anthropic.json": ("/v1/messages", CLAUDE),
    "anthropic.sse": ("/v1/messages", {**CLAUDE, "stream": True}),
    "anthropic_count.json": ("/v1/messages/count_tokens", CLAUDE),
    "responses.json": ("/v1/responses", RESPONSES),
    "responses.sse": ("/v1/responses", {**RESPONSES, "stream": True}),
    "responses_logprobs.sse": (
        "/v1/responses",
        {**RESPONSES, "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "chat_named_tokens.json": ("/v1/chat/completions", {**CHAT, "max_tokens": 4, **NAMED, "logprobs": True}),
    "chat_named_tokens.sse": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 4, **NAMED, "logprobs": True, "stream": True},
    ),
    "completion_named_tokens.sse": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": 4, **NAMED, "logprobs": 0, "stream": True},
    ),
    "completion_told_back.sse": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": 4, **TOLD_BACK, "stream": True},
    ),
    "chat_told_back.sse": ("/v1/chat/completions", {**CHAT, "max_tokens": 4, **TOLD_BACK, "stream": True}),
    "embeddings.json": ("/v1/embeddings", {"input": ["a", "hello"], "model": "fake"}),
    "embeddings_base64.json": (
        "/v1/embeddings",
        {"input": [97], "encoding_format": "base64", "normalize": False},
    ),
    "render_chat.json": (
        "/v1/chat/completions/render",
        {**CHAT, "stop": ["x"], "stream": True, "stream_options": USAGE},
    ),
    "render_completion.json": (
        "/v1/completions/render",
        {**COMPLETION, "logprobs": 2, "return_token_offsets": True},
    ),
    "render_responses.json": ("/v1/responses/render", RESPONSES),
    "render_short.json": ("/render", CHAT),
    "generate.json": (
        GENERATE,
        {"token_ids": [104, 105], "sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 1}},
    ),
    "generate.sse": (
        GENERATE,
        {
            "token_ids": [104, 105],
            "sampling_params": {"max_tokens": 6, "seed": 3, "n": 2},
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "generate_text.sse": (
        GENERATE,
        {
            "token_ids": [104, 105],
            "sampling_params": {"max_tokens": 6, "seed": 3},
            "output_mode": "text",
            "stream": True,
        },
    ),
    "derender_chat.json": ("/v1/chat/completions/derender", {"generate_response": GENERATED}),
    "derender_completion.json": ("/v1/completions/derender", {"generate_responses": [GENERATED]}),
    "derender_short.json": ("/derender", {"generate_response": GENERATED}),
    "derender_chunk.json": (
        "/v1/chat/completions/derender",
        {"stream": True, "generate_chunk": GENERATED_CHUNK},
    ),
    "tokenize.json": ("/tokenize", {"prompt": "a é", "return_token_strs": True}),
    "tokenize_chat.json": ("/tokenize", {"messages": HELLO}),
    "detokenize.json": ("/detokenize", {"tokens": [256, 104, 105, 257]}),
}


def normalised(body: bytes) -> bytes:
    body = re.sub(rb'"(created|created_at|completed_at)":\d{10,}', rb'"\1":0', body)
    body = re.sub(rb'"(resp|msg|rs|fc|call)_[0-9a-f]{24,}"', rb'"\1_X"', body)
    return re.sub(rb'"system_fingerprint":"oneloop-[^"]+"', b'"system_fingerprint":"oneloop-X"', body)


def check(name: str, found: bytes) -> None:
    file = GOLDEN / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(found)
        pytest.fail(f"{name} was missing and is written now")
    assert found == file.read_bytes()


@pytest.mark.parametrize("name", CASES)
async def test_wire_bytes(scripted: Any, name: str) -> None:
    path, body = CASES[name]
    scripted.engine.in_step = True
    scripted.engine.model_info = replace(scripted.engine.model_info, hidden_size=4)
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
    check(name, found)


ECHOES = {
    "completion_echo_logprobs.sse": {
        "prompt": "hé", "max_tokens": 1, "seed": 4, "logprobs": 1, "echo": True, "stream": True,
    },
    "completion_score.json": {"prompt": [[104, 105], [97]], "max_tokens": 0, "logprobs": 1, "echo": True},
    "completion_score.sse": {"prompt": "hé", "max_tokens": 0, "logprobs": 1, "echo": True, "stream": True},
    "completion_prompt_logprobs.json": {"prompt": [104, 105], "max_tokens": 1, "seed": 4, "prompt_logprobs": 1},
    "completion_beams.json": {"prompt": [104], "max_tokens": 2, "n": 2, "use_beam_search": True},
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOES)
async def test_wire_bytes_of_scored_prompts(server: Any, name: str) -> None:
    """The real core over the null executor, one token at most: a stream's steps cannot merge."""
    headers = {"X-Request-Id": "golden"}
    async with server.session.post(
        server.url + "/v1/completions", json=ECHOES[name], headers=headers
    ) as reply:
        assert reply.status == 200
        check(name, normalised(await reply.read()))


async def test_wire_bytes_of_a_socket(scripted: Any) -> None:
    """Every message of /v1/stream: one generation to its end, one refused, one cancelled, a ping, nonsense."""
    scripted.engine.in_step = True
    lines = []
    async with scripted.session.ws_connect(scripted.url + "/v1/stream") as ws:

        async def until(*kinds: str) -> None:
            while True:
                message = (await ws.receive_str()).encode()
                lines.append(re.sub(rb"[0-9a-f]{32}", b"X", message))
                if any(b'"type":"%s"' % kind.encode() in message for kind in kinds):
                    return

        body = {**COMPLETION, "max_tokens": 4, "user": "u", "stream_options": USAGE}
        await ws.send_json({"type": "open", "id": "a", "endpoint": "completions", "body": body})
        await until("done")
        await ws.send_json({"type": "open", "id": "b", "endpoint": "chat", "body": {"messages": []}})
        await until("error")
        await ws.send_json(
            {"type": "open", "id": "c", "endpoint": "completions", "body": COMPLETION, "credit": 0}
        )
        await until("opened")
        await ws.send_json({"type": "cancel", "id": "c"})
        await until("done")
        await ws.send_json({"type": "ping"})
        await until("pong")
        await ws.send_json({"type": "close"})
        await until("error")
    # How far the cancelled one had come is a matter of time.
    lines[-3] = re.sub(rb'"(total|completion)_tokens":\d+', rb'"\1_tokens":0', lines[-3])
    check("socket.txt", normalised(b"\n".join(lines)) + b"\n")


async def test_wire_bytes_of_control(scripted: Any) -> None:
    """A stream that is cancelled, and what its controller is told: the second time there is nobody."""
    scripted.engine.step_s, scripted.engine.script = 0.002, "x" * 300
    headers = {"X-Request-Id": "golden"}
    body = {**COMPLETION, "max_tokens": 200, "stream": True}
    async with scripted.session.post(scripted.url + "/v1/completions", json=body, headers=headers) as stream:
        await stream.content.readuntil(b"\n\n")
        pages = []
        for _ in range(2):
            path = f"{scripted.url}/v1/requests/golden/control"
            async with scripted.session.post(path, json={"action": "cancel"}) as reply:
                pages.append(b"%d %b" % (reply.status, await reply.read()))
            rest = await stream.read()
            await scripted.settled()
    last = re.sub(rb'"text":"x+"', b'"text":"x"', rest.split(b"\n\n")[-3])
    assert rest.endswith(b"\n\ndata: [DONE]\n\n")
    check("control.txt", normalised(b"\n".join([*pages, last])) + b"\n")
