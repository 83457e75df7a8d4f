"""HTTP itself (T13, T14, B-24, B-11): malformed requests get one refusal, nothing is smuggled, the next request works.

The whole file runs a second time on aiohttp's pure-Python parser (last test).
"""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oneloop.api.connection import Connection

BODY = b'{"prompt":"a","max_tokens":1}'
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


def post(headers: bytes = b"", body: bytes = BODY, *, length: bytes | None = None) -> bytes:
    size = b"Content-Length: %b\r\n" % (str(len(body)).encode() if length is None else length)
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        + size + headers + b"\r\n" + body
    )  # fmt: skip


def get(
    target: bytes = b"/version", headers: bytes = b"Host: x\r\nConnection: close\r\n", version: bytes = b"1.1"
) -> bytes:
    return b"GET %b HTTP/%b\r\n%b\r\n" % (target, version, headers)


STREAM = post(body=b'{"prompt":"a","max_tokens":30,"stream":true}').replace(b"Connection: close\r\n", b"")
"""A request that is answered on the express lane."""


def replies(data: bytes) -> list[int]:
    """Status of every reply in a byte stream."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/"), data[:80]
        status = int(head.split(b" ", 2)[1])
        found.append(status)
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if status == 100:
            found.pop()
            data = rest
        elif fields.get(b"transfer-encoding") == b"chunked":
            data = rest.partition(b"0\r\n\r\n")[2]
        else:
            data = rest[int(fields.get(b"content-length", b"0")) :]
    return found


REFUSED = {
    "CL and TE": post(b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "two CL": post(b"Content-Length: 5\r\n"),
    "two equal CL": post(b"Content-Length: %d\r\n" % len(BODY)),
    "CL +5": post(length=b"+5"),
    "CL -1": post(length=b"-1"),
    "CL 5,5": post(length=b"5,5"),
    "CL 0x1d": post(length=b"0x1d"),
    "CL with a space": post(length=b"2 9"),
    "CL huge": post(length=b"9" * 30),
    "space before colon": get(headers=b"Host : x\r\n"),
    "obs-fold": get(headers=b"Host: x\r\nX-A: b\r\n c\r\n"),
    "CR in value": get(headers=b"Host: x\r\nX-A: b\rc\r\n"),
    "NUL in value": get(headers=b"Host: x\r\nX-A: b\0c\r\n"),
    "NUL in name": get(headers=b"Host: x\r\nX\0A: b\r\n"),
    "no Host": get(headers=b"Connection: close\r\n"),
    "two Hosts": get(headers=b"Host: x\r\nHost: y\r\n"),
    "Host with a path": get(headers=b"Host: x/y?z\r\n"),
    "Host with a user": get(headers=b"Host: x@y\r\n"),
    "empty header name": get(headers=b"Host: x\r\n: b\r\n"),
    "no colon": get(headers=b"Host: x\r\nnonsense\r\n"),
    "version 9": get(version=b"9.9"),
    "version HTTP/1.1x": get(version=b"1.1x"),
    "no version": b"GET /version\r\nHost: x\r\n\r\n",
    "long request line": get(target=b"/" + b"a" * (1 << 20)),
    "long header": get(headers=b"Host: x\r\nX-A: " + b"b" * (1 << 20) + b"\r\n"),
    "many headers": get(headers=b"Host: x\r\n" + b"".join(b"X-%d: b\r\n" % i for i in range(10**4))),
    "method with a space": b"GE T /version HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": bytes(random.Random(3).randbytes(512)) + b"\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32) + b"\r\n\r\n",
}


def chunked(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + body
    )


BAD_CHUNKS = {
    "size ffffffffffffffff": chunked(b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "size -1": chunked(b"-1\r\nabc\r\n0\r\n\r\n"),
    "size +1": chunked(b"+1\r\na\r\n0\r\n\r\n"),
    "size 0x1": chunked(b"0x1\r\na\r\n0\r\n\r\n"),
    "no size": chunked(b"\r\na\r\n0\r\n\r\n"),
    "data longer than its size": chunked(b"1\r\nabc\r\n0\r\n\r\n"),
    "long extension": chunked(b"1;" + b"x" * (1 << 20) + b"\r\na\r\n0\r\n\r\n"),
    "many trailers": chunked(b"1\r\na\r\n0\r\n" + b"X: y\r\n" * 10**5 + b"\r\n"),
}
ODD_TRANSFER_ENCODINGS = [
    b"xchunked",
    b"chunked, identity",
    b"identity, chunked",
    b"gzip",
    b"chunked\x0b",
    b"chunked, chunked",
]


@pytest.mark.parametrize("name", [*REFUSED, *BAD_CHUNKS])
async def test_malformed(server: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("oneloop.api.body.BODY_TIMEOUT_S", 0.5)
    data = (REFUSED | BAD_CHUNKS)[name]
    reply = await server.raw(data, wait_s=8)
    assert all(status in (400, 408, 413, 414, 431, 501, 505) for status in replies(reply)), reply[:200]
    assert len(replies(reply)) <= 1
    if reply:
        answer = json.loads(reply.partition(b"\r\n\r\n")[2])
        assert answer["error"]["code"] == replies(reply)[0]
        assert b".py" not in reply
    assert (await server.get("/version"))[0] == 200


CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
LATE_FAULTS = {
    "size": b"zz\r\n",
    "end of a chunk": b"1\r\nabc",
    "folded trailer": CHUNK + b"0\r\n a\r\n\r\n",
    "long trailer": CHUNK + b"0\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("behind", [b"", get(headers=b"Host: x\r\n"), STREAM])
@pytest.mark.parametrize("name", LATE_FAULTS)
async def test_a_body_that_breaks_off_later_is_refused_at_once(
    server: Any, caplog: pytest.LogCaptureFixture, name: str, behind: bytes
) -> None:
    """Its head is being answered already, or waits for another reply: neither waits for the rest until it is late."""
    head = chunked(b"").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(behind + head)
    await asyncio.sleep(0.05)
    writer.write(LATE_FAULTS[name])
    reply = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    assert replies(reply) == [200, 400][not behind :]
    assert b"wrongly chunked" in reply
    assert b"Connection: close" in reply
    assert not caplog.records


@pytest.mark.parametrize("coding", ODD_TRANSFER_ENCODINGS)
async def test_odd_transfer_codings(server: Any, coding: bytes) -> None:
    """Refused, or read as what they say; never a second request out of the body."""
    data = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: "
        + coding + b"\r\n\r\n0\r\n\r\n" + SMUGGLED
    )  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await asyncio.sleep(0.2)
    writer.write_eof()
    reply = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert 404 not in replies(reply)


async def test_no_turn_parses_much(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body in chunks of a byte each is the dearest to parse: the streams of others go on in between."""
    sizes: list[int] = []
    original = Connection.data_received

    def data_received(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        original(self, data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    body = b"".join(b"1\r\n%c\r\n" % value for value in b'{"prompt":"%b"}' % (b"x" * 100_000)) + b"0\r\n\r\n"
    answer = await server.raw(chunked(body), wait_s=10)
    assert replies(answer) == [400]
    assert sum(sizes) >= len(body)
    assert max(sizes) <= 32 << 10


def fat(num_bytes: int, path: bytes = b"/version") -> bytes:
    """A request with a head of about so many bytes, none of its headers large."""
    headers = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 1000) for number in range(num_bytes // 1000))
    return get(path, b"Host: x\r\n" + headers)


async def test_a_head_is_bounded_as_a_whole(server: Any) -> None:
    assert replies(await server.raw(fat(60_000) + get())) == [200, 200]
    reply = await server.raw(fat(120_000))
    assert replies(reply) in ([400], [])
    reply = await server.raw(fat(60_000) + STREAM + fat(60_000) + get())
    assert replies(reply) == [200, 200, 200, 200]


async def test_blank_lines_before_a_request_are_bounded(server: Any) -> None:
    assert replies(await server.raw(b"\r\n" * 1000 + get())) == [200]
    assert replies(await server.raw(b"\r\n" * 100_000 + get())) in ([400], [])


@pytest.mark.parametrize(
    "framing",
    [
        b"0\r\n" + b"".join(b"X-%d: %b\r\n" % (number, b"a" * 2000) for number in range(110)),
        b"1;" + b"x" * 200_000,
    ],
    ids=["trailers", "extension"],
)
async def test_what_frames_a_body_is_bounded(server: Any, framing: bytes) -> None:
    """Its end is not waited for."""
    assert replies(await server.raw(chunked(CHUNK + framing))) in ([400], [])


async def test_a_refused_body_is_no_head(server: Any) -> None:
    """What is thrown away behind a refusal does not count, so the connection stays."""
    body = b" " * 500_000
    head = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert replies(await server.raw(head + body + get())) == [404, 200]


async def test_what_waits_behind_a_reply_is_bounded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads are read a few at a time, and all of them are answered."""
    num_read = 0
    original = Connection.data_received

    def data_received(self: Connection, data: bytes) -> None:
        nonlocal num_read
        num_read += len(data)
        original(self, data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    server.engine.paused.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(STREAM + fat(60_000) * 40 + get())
    before = -1
    while before != num_read:
        before = num_read
        await asyncio.sleep(0.1)
    assert num_read < 600_000
    server.engine.paused.set()
    reply = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert replies(reply) == [200] * 42


async def test_bare_line_feeds_smuggle_nothing(server: Any) -> None:
    data = b"GET /version HTTP/1.1\nHost: x\nConnection: close\n\n"
    assert replies(await server.raw(data)) in ([200], [400], [])
    data = post(b"X-A: b\n" + b"Content-Length: 0\r\n")
    assert replies(await server.raw(data)) in ([400], [])


async def test_one_body_is_one_request(server: Any) -> None:
    """A request hidden in a body stays body."""
    body = json.dumps({"prompt": SMUGGLED.decode(), "max_tokens": 1}).encode()
    assert replies(await server.raw(post(body=body))) == [200]


async def test_pipelined_requests(server: Any) -> None:
    keep = b"Host: x\r\n"
    data = get(headers=keep) + get(b"/nope", headers=keep) + get(b"/v1/models")
    assert replies(await server.raw(data)) == [200, 404, 200]


async def test_keep_alive_survives_refusals(server: Any) -> None:
    headers = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    bad = b'{"prompt":5}'
    data = headers % len(bad) + bad + headers % len(BODY) + BODY + get()
    assert replies(await server.raw(data)) == [400, 200, 200]


async def test_http_1_0(server: Any) -> None:
    reply = await server.raw(b"GET /version HTTP/1.0\r\n\r\n")
    assert replies(reply) == [200]


async def test_head(server: Any) -> None:
    for target, status in (
        (b"/health", 200),
        (b"/v1/models", 200),
        (b"/nope", 404),
        (b"/v1/completions", 405),
    ):
        reply = await server.raw(b"HEAD %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        head, _, body = reply.partition(b"\r\n\r\n")
        assert int(head.split(b" ")[1]) == status
        assert body == b""


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"), ("DELETE", "/v1/chat/completions", "POST"), ("OPTIONS", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET, HEAD"), ("PUT", "/health", "GET, HEAD"), ("DELETE", "/ping", "GET, HEAD, POST"),
    ],
)  # fmt: skip
async def test_wrong_methods(server: Any, method: str, path: str, allowed: str) -> None:
    async with server.session.request(method, server.url + path) as reply:
        assert reply.status == 405
        assert reply.headers["Allow"] == allowed
        answer = await reply.json()
    assert answer["error"]["type"] == "MethodNotAllowedError"


@pytest.mark.parametrize("path", ["/", "/v1", "/nope", "/v1/models/", "/V1/models", "/update_weights", "/load_lora_adapter",
                                  "/reset_prefix_cache", "/sleep", "/collective_rpc", "/start_profile", "/server_info",
                                  "/slots", "/props", "/debug/x", "/invocations", "/docs"])  # fmt: skip
async def test_unknown_routes(server: Any, path: str) -> None:
    """T17: nothing administrative is there."""
    for method in ("GET", "POST"):
        async with server.session.request(method, server.url + path) as reply:
            assert reply.status == 404
            assert (await reply.json())["error"] == {
                "message": "There is no such route.", "type": "NotFoundError", "param": None, "code": 404,
            }  # fmt: skip


async def test_expect_continue(server: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    whole = post(b"Expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert replies(await asyncio.wait_for(reader.read(), 3)) == [200]
    writer.close()
    for target in (b"/version", b"/nope"):
        reply = await server.raw(get(target, b"Host: x\r\nConnection: close\r\nExpect: secret\r\n"))
        assert replies(reply) == [417]
        assert b"secret" not in reply
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "ExpectationFailedError"


async def test_chunked_body_in_single_bytes(server: Any) -> None:
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert replies(await server.raw(chunked(pieces))) == [200]


async def test_headers_tell_nothing_of_the_machine(server: Any) -> None:
    for data in (get(), get(b"/nope"), post(), post(body=b"x"), REFUSED["two CL"], get(b"/metrics")):
        head = (await server.raw(data)).partition(b"\r\n\r\n")[0]
        assert b"Server: oneloop\r\n" in head
        assert b"aiohttp" not in head
        assert b"Python" not in head


async def test_absolute_target(server: Any) -> None:
    assert replies(await server.raw(get(b"http://other.example/version"))) == [200]


async def test_upgrade_is_ignored(server: Any) -> None:
    reply = await server.raw(get(headers=b"Host: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n"))
    assert replies(reply) == [200]


async def test_too_large_is_said_while_the_body_is_still_coming(server: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post(body=b"", length=str(100 << 20).encode()))
    writer.write(b" " * 100_000)
    reply = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
    assert replies(reply.split(b"\r\nContent-Length", 1)[0] + b"\r\n\r\n")[0] == 413
    writer.close()


async def test_slow_headers_and_bodies_are_cut(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-11, with both limits set to half a second, between two of the bytes that trickle in."""
    monkeypatch.setattr("oneloop.api.server.HEADER_TIMEOUT_S", 0.55)
    monkeypatch.setattr("oneloop.api.body.BODY_TIMEOUT_S", 0.55)

    async def trickle(server: Any, first: bytes, rest: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(first)
        reply = asyncio.create_task(reader.read())
        for byte in rest:
            if reply.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.1)
        writer.close()
        try:
            return await asyncio.wait_for(reply, 3)
        except ConnectionResetError:  # cut while a byte was on its way
            return b""

    async with serve() as server:
        body = post(body=b" " * 100)
        head, _, rest = body.partition(b"\r\n\r\n")
        slow = [trickle(server, head[:30], head[30:] + b"x" * 30) for _ in range(20)]
        slow += [trickle(server, head + b"\r\n\r\n", rest) for _ in range(20)]
        *answers, good = await asyncio.gather(*slow, server.get("/version"))
        assert good[0] == 200
        assert all(answer == b"" for answer in answers[:20])
        assert {replies(answer)[0] for answer in answers[20:]} == {408}


async def test_pieces_of_malformed_input(server: Any) -> None:
    """Random damage to good requests, fed in random pieces: no desynchronised reply, no unhandled exception."""
    source = random.Random(5)
    bases = [
        *REFUSED.values(),
        *BAD_CHUNKS.values(),
        post(),
        get(),
        chunked(b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    ]
    bases = [base for base in bases if len(base) < 10_000]

    async def one() -> None:
        data = bytearray(source.choice(bases))
        for _ in range(source.randint(0, 4)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 3)] = source.randbytes(source.randint(0, 3))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            while data:
                size = source.randint(1, 200)
                writer.write(bytes(data[:size]))
                del data[:size]
                await asyncio.sleep(0)
            writer.write_eof()
            reply = await asyncio.wait_for(reader.read(), 10)
            assert len(replies(reply)) <= 3
            assert all(status in (200, 400, 404, 405, 408, 413, 415, 417) for status in replies(reply))
        except OSError:
            pass  # closed on us
        finally:
            writer.close()

    for _ in range(40):
        await asyncio.gather(*[one() for _ in range(10)])
    await server.settled()
    assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200


def test_all_of_this_on_the_python_parser(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not python_parser",
         f"--basetemp={tmp_path / 'tests'}", Path(__file__).name, "test_auth.py"],
        cwd=Path(__file__).parent, env={**os.environ, "AIOHTTP_NO_EXTENSIONS": "1"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
