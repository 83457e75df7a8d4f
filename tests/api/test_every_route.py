"""What is no JSON, or no object, is refused at every door alike (T8, T10, T11, T12, T28)."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
LEAKS = re.compile(
    r"(/\w+/|\.py|Traceback|0x[0-9a-f]{6}|site-packages|line \d+, in|python3|orjson|aiohttp|msgspec)"
)
ROUTES = (
    CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE, "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/v1/embeddings", "/inference/v1/generate", "/render", "/v1/responses/render", "/derender",
    f"{COMPLETIONS}/derender",
    "/v1/requests/x/control",
)  # fmt: skip
UNREADABLE = [
    b"", b"[]", b'"x"', b"null", b"5", b'{"a":NaN}', b'{"temperature":Infinity}', b'{"a":1e999}', b'{"a":"\xff"}',
    b'{"a":"\\ud800"}', b'\xef\xbb\xbf{"a":1}', '{"a":1}'.encode("utf-16"), b"[" * 10**5, b'{"a":' * 10**4,
    b'{"a":' + b"1" * 4000 + b"}", b'{"a":1}x',
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_reads_strictly(server: Any, path: str) -> None:
    """T8, T10, T11, T12 at each door: a 400 that says so, whose body is itself sound JSON; and another type is 415."""
    for data in UNREADABLE:
        async with server.session.post(
            server.url + path, data=data, headers={"Content-Type": "application/json"}
        ) as reply:
            page = await reply.text()
            assert reply.status == 400, (data[:30], page)
        answer = orjson.loads(page)
        assert not LEAKS.search(page.replace(path, "")), page
        assert answer["error"]["message"]
        assert (await server.get("/health"))[0] == 200
    status, _ = await server.post_raw(path, b'{"a":1}', **{"Content-Type": "text/plain"})
    assert status == 415
