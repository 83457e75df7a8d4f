"""HTTP as servers speak it, cut anywhere; and what is no HTTP."""

import asyncio
import socket

import pytest

from oneloop_bench.load.connection import READ_BYTES, Connection, Endpoint, Pool

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"


class Transport(asyncio.Transport):
    """Takes what is written; closed by abort()."""

    def __init__(self):
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data):
        self.written += data

    def abort(self):
        self.is_closed = True


class Noted:
    """A reply's callbacks."""

    def __init__(self):
        self.status, self.headers, self.body, self.ends = None, None, b"", []

    def on_head(self, status, headers):
        self.status, self.headers = status, headers

    def on_body(self, data, now):
        assert data
        self.body += data

    def on_end(self, now, error):
        self.ends.append(error)


def connect():
    buffer = memoryview(bytearray(READ_BYTES))
    connection, transport = Connection(buffer), Transport()
    connection.connection_made(transport)
    return connection, transport


def hear(connection, data):
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def exchange(data, size):
    """(connection, reply) after these bytes, in pieces of `size`."""
    connection, _ = connect()
    reply = Noted()
    connection.send(b"request", reply)
    for at in range(0, len(data), size):
        hear(connection, data[at : at + size])
    return connection, reply


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize(
    "data",
    [
        STREAM + b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n",
        STREAM + b"5\r\nhello\r\n06\r\n world\r\n0\r\nX-Trailer: 1\r\nX-More: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:  11\r\n\r\nhello world",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
        b"HTTP/1.1 100 C\r\n\r\n" * 3000 + b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world",
    ],
)
def test_bodies(data, size):
    connection, reply = exchange(data, size)
    assert (reply.status, reply.body, reply.ends) == (200, b"hello world", [None])
    assert connection.is_open
    assert connection.was_used


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_a_connection_that_ends_with_its_reply(head, size):
    connection, reply = exchange(head + b"ok", size)
    assert (reply.body, reply.ends) == (b"ok", [None])
    assert not connection.is_open


def test_a_body_until_the_end():
    connection, reply = exchange(b"HTTP/1.1 200 OK\r\n\r\nhello world", 5)
    assert reply.ends == []
    connection.connection_lost(None)
    assert (reply.body, reply.ends) == (b"hello world", [None])


def test_nothing_to_say():
    _, reply = exchange(b"HTTP/1.1 204 No Content\r\n\r\n", 1000)
    assert (reply.status, reply.ends) == (204, [None])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP reply"),
        (b"x" * 100_000, "the reply's head has more than 65536 bytes"),
        (STREAM + b"hello\r\n", "no length of a chunk: b'hello'"),
        (STREAM + b"-6\r\nhello\r\n", "no length of a chunk: b'-6'"),
        (STREAM + b"+5\r\nhello\r\n", "no length of a chunk: b'+5'"),
        (STREAM + b"1_0\r\nhello\r\n", "no length of a chunk: b'1_0'"),
        (STREAM + b"\r\nhello\r\n", "no length of a chunk: b''"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: GZip\r\n\r\nx", "the reply is compressed"),
    ],
)
def test_what_is_no_http(data, message):
    connection, reply = exchange(data, 50_000)
    (error,) = reply.ends
    assert error.startswith(message)
    assert not connection.is_open


@pytest.mark.parametrize(
    "data", [b"", STREAM, STREAM + b"5\r\nhello\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell"]
)
def test_a_connection_that_is_lost(data):
    connection, reply = exchange(data, 1000)
    connection.connection_lost(ConnectionResetError("reset"))
    assert reply.ends == ["the server closed the connection: reset"]
    assert connection.has_answered == bool(data)


def test_bytes_that_nobody_asked_for_end_the_connection():
    connection, reply = exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 1000)
    hear(connection, b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert not connection.is_open
    assert reply.ends == [None]


def test_one_request_after_another():
    connection, transport = connect()
    for number in range(3):
        reply = Noted()
        connection.send(b"request %d;" % number, reply)
        hear(connection, STREAM + b"1\r\n%d\r\n0\r\n\r\n" % number)
        assert (reply.body, reply.ends) == (b"%d" % number, [None])
    assert transport.written == b"request 0;request 1;request 2;"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", False)),
        ("localhost:9000/", ("localhost", 9000, "", False)),
        ("http://[::1]:80/api/", ("::1", 80, "/api", False)),
        ("https://example.org", ("example.org", 443, "", True)),
    ],
)
def test_addresses(url, expected):
    endpoint = Endpoint.from_url(url)
    assert (endpoint.host, endpoint.port, endpoint.path, endpoint.tls is not None) == expected


@pytest.mark.parametrize("url", ["ftp://example.org", "http://", "unix:///socket"])
def test_no_addresses(url):
    with pytest.raises(ValueError, match="is no http:// or https:// address"):
        Endpoint.from_url(url)


def test_a_request_on_the_wire():
    head = Endpoint.from_url("http://[::1]:81/api").head("POST", "/v1/completions", {"X": "y"})
    assert head == b"POST /api/v1/completions HTTP/1.1\r\nHost: [::1]:81\r\nX: y"


async def test_a_name_is_looked_up_once(fake, monkeypatch):
    asked = []
    loop = asyncio.get_running_loop()
    look_up = loop.getaddrinfo

    async def noted(host, *more, **options):
        asked.append(host)
        return await look_up(host, *more, **options)

    monkeypatch.setattr(loop, "getaddrinfo", noted)
    pool = Pool(Endpoint.from_url(fake.url.replace("127.0.0.1", "localhost")))
    for _ in range(3):
        pool.give(await pool.take(fresh=True))
    assert asked == ["localhost"]
    pool.close()
    await asyncio.sleep(0)


async def test_the_pool_gives_open_connections_only(fake):
    pool = Pool(Endpoint.from_url(fake.url))
    first, second = await pool.take(), await pool.take()
    assert first is not second
    pool.give(first)
    pool.give(second)
    second.close()
    assert await pool.take() is first
    third = await pool.take(fresh=True)
    assert third not in (first, second)
    pool.give(first)
    pool.give(third)
    pool.close()
    await asyncio.sleep(0)
    assert not first.is_open
    assert not third.is_open


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1", {"A": "b\r\nX: y"}),
        ("/v1", {"A": "日本"}),
        ("/日本", {}),
        ("/v1 2", {}),
        ("/v1", {"A": "\udcff"}),
    ],
)
def test_what_no_head_can_hold(path, headers):
    with pytest.raises(ValueError, match=r"request's head|has a space"):
        Endpoint.from_url("http://127.0.0.1").head("POST", path, headers)


def test_port_0_is_not_another():
    assert Endpoint.from_url("http://127.0.0.1:0").port == 0


def test_how_long_a_connection_may_take():
    """Where somebody listens and never answers: a TLS handshake."""

    async def take():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            with pytest.raises(TimeoutError):
                await Pool(Endpoint.from_url(url, insecure=True), 0.1).take()

    asyncio.run(asyncio.wait_for(take(), 4))
