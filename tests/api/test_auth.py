"""T15, T16: with a key set everything asks for it, whatever the path looks like; only liveness is open."""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

import pytest

from oneloop.api.auth import KeyCheck

KEY = "s3cret-key-of-32-characters-0001"
GOOD = f"Authorization: Bearer {KEY}\r\n"
UNAUTHORIZED = b'{"error":"Unauthorized"}'
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/fake"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/v1/responses"), ("GET", "/v1/responses/x"), ("DELETE", "/v1/responses/x"), ("POST", "/v1/responses/x/cancel"),
    ("GET", "/v1/stream"), ("POST", "/v1/requests/x/control"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/docs"),
    ("GET", "/openapi.json"), ("GET", "/debug"), ("GET", "/"), ("GET", "/nope"),
]  # fmt: skip
WRONG_HEADERS = [
    "",
    "Authorization: Bearer wrong\r\n",
    f"Authorization: Bearer {KEY}x\r\n",
    f"Authorization: Bearer {KEY[:-1]}\r\n",
    f"Authorization: Bearer  {KEY}\r\n",
    f"Authorization: bearer {KEY}\r\n",
    f"Authorization: {KEY}\r\n",
    f"Authorization: Basic {KEY}\r\n",
    "Authorization: Bearer \r\n",
    "Authorization:\r\n",
    "Authorization: Bearer schl\u00fcssel\r\n",
    f"X-Api-Key: {KEY}x\r\n",
    f"X-Api-Key: Bearer {KEY}\r\n",
    f"X-Api-Key: {KEY}\r\nX-Api-Key: {KEY}\r\n",
    f"X-Api-Key: wrong\r\n{GOOD}",
    f"X-Api-Key: {KEY}\r\nAuthorization: Bearer wrong\r\n",
]
TRICKS = [
    "/v1/models?key=" + KEY, "//v1/models", "/v1/../health", "/V1/models", "/%2fv1/models", "/v1/models/", "/health/.",
    "/health/../v1/models", "/health;/../v1/models", "/health%2f..%2fv1/models", "/v1/models%00/health", "/health.",
    "http://127.0.0.1/v1/models", "http://evil.example/v1/models", "/v1/models#/health", "/./v1/models", "/metrics/health",
]  # fmt: skip


@pytest.fixture
async def locked(serve: Any) -> Any:
    async with serve(api_key=KEY) as served:
        yield served


def message(method: str, target: str, headers: str, host: str = "127.0.0.1") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\nContent-Length: 0\r\n\r\n".encode()


def status_and_body(reply: bytes) -> tuple[int, bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_asks_for_the_key(locked: Any, method: str, path: str) -> None:
    for headers in WRONG_HEADERS:
        reply = await locked.raw(message(method, path, headers))
        assert status_and_body(reply) == (401, UNAUTHORIZED), headers
        assert b"WWW-Authenticate: Bearer" in reply
    twice = await locked.raw(message(method, path, GOOD + GOOD))
    assert status_and_body(twice)[0] in (400, 401)
    assert status_and_body(await locked.raw(message(method, path, GOOD)))[0] not in (401, 403)


@pytest.mark.parametrize("target", TRICKS)
async def test_paths_that_pretend(locked: Any, target: str) -> None:
    status, body = status_and_body(await locked.raw(message("GET", target, "")))
    assert status in (400, 401)
    if status == 401:
        assert body == UNAUTHORIZED


@pytest.mark.parametrize("host", ["x/health?", "x?/health", "127.0.0.1/health", "a b", "x@y"])
async def test_hosts_that_pretend(locked: Any, host: str) -> None:
    status, _ = status_and_body(await locked.raw(message("GET", "/v1/models", "", host)))
    assert status in (400, 401)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "FOO"])
async def test_other_methods(locked: Any, method: str) -> None:
    for path in ("/v1/models", "/v1/completions", "/nope"):
        status, body = status_and_body(await locked.raw(message(method, path, "")))
        assert status in (400, 401)
        assert method == "HEAD" or status == 400 or body == UNAUTHORIZED
    if method != "HEAD":
        assert status_and_body(await locked.raw(message(method, "/health", "")))[0] in (400, 401)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_what_is_open(locked: Any, method: str, path: str) -> None:
    assert status_and_body(await locked.raw(message(method, path, "")))[0] == 200


ANTHROPIC = b'{"type":"error","error":{"type":"authentication_error","message":"Unauthorized"}'


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("GET", "/v1/messages")],
)
async def test_anthropics_routes_ask_for_it_in_their_form(locked: Any, method: str, path: str) -> None:
    for headers in WRONG_HEADERS:
        status, body = status_and_body(await locked.raw(message(method, path, headers)))
        assert (status, body.startswith(ANTHROPIC)) == (401, True), headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"X-Api-Key": KEY},
        {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY},
    ],
)
async def test_the_key_lets_in(locked: Any, headers: dict[str, str]) -> None:
    assert (await locked.get("/v1/models", headers=headers))[0] == 200
    assert (await locked.post("/v1/completions", {"prompt": "a"}, headers=headers))[0] == 200


async def test_without_a_key_everything_is_open(server: Any) -> None:
    assert (await server.get("/v1/models"))[0] == 200
    assert (await server.get("/v1/models", headers={"Authorization": "Bearer anything"}))[0] == 200


def test_time_taken_says_nothing_about_the_key() -> None:
    """Welch's t between keys that share nothing, half, and all but the last byte, and that are longer or shorter."""
    check = KeyCheck(KEY)
    keys = [KEY[:shared] + "x" * (32 - shared) for shared in (0, 8, 16, 31)] + [KEY[:16], KEY + "y" * 32]
    order = list(range(len(keys))) * 4000
    random.Random(1).shuffle(order)
    times: list[list[int]] = [[] for _ in keys]
    values = [[f"Bearer {key}"] for key in keys]
    for index in order:
        begin = time.perf_counter_ns()
        check.admits(values[index])
        times[index].append(time.perf_counter_ns() - begin)
    same_length = [sorted(samples)[:3600] for samples in times[:4]]
    for first in same_length:
        for second in same_length:
            spread = (statistics.variance(first) + statistics.variance(second)) / len(first)
            difference = abs(statistics.fmean(first) - statistics.fmean(second))
            assert difference < max(4 * spread**0.5, 20), "ns apart"


async def test_keys_are_asked_for_under_load(locked: Any) -> None:
    replies = await asyncio.gather(*[locked.raw(message("GET", "/v1/models", "")) for _ in range(50)])
    assert {status_and_body(reply) for reply in replies} == {(401, UNAUTHORIZED)}
