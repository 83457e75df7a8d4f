"""What is answered while the model loads."""

import asyncio
import logging
import socket
import struct
from contextlib import asynccontextmanager

import pytest

from oneloop.cli.loading import answering_while_loading

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"


@asynccontextmanager
async def connected():
    """(reader, writer) of a client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with answering_while_loading(listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            yield reader, writer
            writer.close()


async def test_a_client_that_is_still_sending_hears_the_refusal():
    """Clients that send a request in pieces fail at the next piece when the connection is reset under them."""
    async with connected() as (reader, writer):
        writer.write(HEAD)
        for _ in range(30):
            await asyncio.sleep(0.002)
            writer.write(b"x" * 10_000)
            await writer.drain()
        received = await asyncio.wait_for(reader.read(), 5)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After" in received


async def test_who_never_ends_is_closed(monkeypatch):
    monkeypatch.setattr("oneloop.cli.loading._LINGERING_S", 0.05)
    async with connected() as (reader, writer):
        writer.write(HEAD)
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 503 ")
        async with asyncio.timeout(5):
            while not reader.exception():
                writer.write(b"x")
                await asyncio.sleep(0.01)
                if writer.transport.is_closing():
                    break


@pytest.mark.parametrize("has_asked", [False, True])
def test_the_end_of_the_loop_is_quiet(caplog, has_asked):
    """Who has asked for nothing whole, or has not left, when a signal comes first."""

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with answering_while_loading(listening):
                client = socket.create_connection(listening.getsockname())
                client.sendall(HEAD if has_asked else b"GET /")
                await asyncio.sleep(0.05)
        return client

    asyncio.run(main()).close()
    assert not caplog.records


async def test_a_client_that_resets_is_no_error(caplog):
    """Its reset comes between its request and the refusal."""
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with answering_while_loading(listening):
            for _ in range(20):
                client = socket.create_connection(listening.getsockname())
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not caplog.records
