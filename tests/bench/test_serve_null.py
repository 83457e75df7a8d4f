"""The counting client counts what came and believes no stream that ends otherwise than it must; its benches, small."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from oneloop.cli.serve import allow_many_descriptors
from oneloop_bench.idle_connections import KINDS, MAX_KIB, Crowd, measure_active, memory_kib, settle
from oneloop_bench.loop_lag import MAX_MS, MAX_P999_MS, lag_ms, measure
from oneloop_bench.serve_null.__main__ import measure_ceiling, measure_pace
from oneloop_bench.serve_null.client import Counts, count_streams, make_requests
from oneloop_bench.serve_null.machine import choose_cpus, null_server, on_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"data: [DONE]"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def usage(num_tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens


@contextmanager
def replying(pieces: Sequence[bytes], pause_s: float = 0.0) -> Iterator[int]:
    """A server that answers one request with these writes, and pauses after each, and then closes; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            sock = listening.accept()[0]
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.recv(1 << 16)
                for piece in pieces:
                    sock.sendall(piece)
                    time.sleep(pause_s)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def read(
    pieces: Sequence[bytes], num_tokens: int, lead_in: int | None = None, pause_s: float = 0.0
) -> Counts:
    with replying(pieces, pause_s) as port:
        return count_streams(port, make_requests(1, num_tokens), 1, num_tokens, lead_in=lead_in)


@pytest.mark.parametrize("size", [1, 3, 7, 50, 10_000])
def test_events_are_counted_however_they_are_cut(size):
    whole = HEAD + chunk(TOKEN) * 3 + chunk(TOKEN * 4 + TOKEN + usage(8) + DONE) + b"0\r\n\r\n"
    counts = read([whole[start : start + size] for start in range(0, len(whole), size)], 8)
    assert (counts.num_events, counts.num_tokens, len(counts.first)) == (8, 8, 1)
    assert counts.wall_s >= counts.first[0] > 0


def test_gaps_begin_after_the_lead_in():
    """The first time is that of the last event before; of events that come together but the first have a gap of 0."""
    last = chunk(TOKEN * 2 + usage(6) + DONE) + b"0\r\n\r\n"
    gaps = list(read([HEAD, *[chunk(TOKEN)] * 4, last], 6, lead_in=2, pause_s=0.03).gaps)
    assert [gap > 0.02 for gap in gaps] == [True, True, False]
    assert gaps[-1] == 0


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([HEAD, chunk(TOKEN * 2)], "early"),
        ([HEAD, chunk(TOKEN * 2 + usage(2)), b"0\r\n\r\n"], "early"),
        ([HEAD, chunk(TOKEN * 2 + usage(3) + DONE), b"0\r\n\r\n"], "a stream of 2 tokens ended with"),
        ([HEAD, chunk(TOKEN * 2 + DONE), b"0\r\n\r\n"], "a stream of 2 tokens ended with"),
        ([HEAD, chunk(TOKEN * 3 + usage(2) + DONE), b"0\r\n\r\n"], "2 tokens brought 3 events"),
        ([HEAD, chunk(usage(2) + DONE), b"0\r\n\r\n"], "2 tokens brought 0 events"),
    ],
)
def test_a_stream_that_does_not_end_as_it_must(pieces, message):
    with pytest.raises(RuntimeError, match=message):
        read(pieces, 2)


def test_the_ceiling_writes_what_is_counted():
    cpus = choose_cpus()
    with on_cpu(cpus.client):
        assert measure_ceiling(cpus, 16) > 1000


def test_each_token_is_an_event_of_its_own():
    """However far the loop is behind: with steps that take no time, and at a pace."""
    cpus = choose_cpus()
    with null_server(cpus, 64, 256) as server:
        count_streams(server.port, make_requests(8, 256), 8, 256)
        counts = count_streams(server.port, make_requests(128, 256), 64, 256)
    assert counts.num_tokens == 128 * 256
    # The first tokens of a reply go through Python, where what waits is merged.
    assert counts.num_events > 0.95 * counts.num_tokens
    pace = measure_pace(cpus, 16, 2.0, 1)
    assert pace["tokens_per_event"] < 1.01
    assert 1.9 < pace["itl_p50_ms"] < 6


def test_idle_connections_take_little_memory():
    """B-10 in small: 1,000 of each kind, 50 KiB each at most, and 100 active ones are served beside them."""
    allow_many_descriptors()
    cpus = choose_cpus()
    for kind in KINDS:
        with null_server(cpus, 200, 512) as server, Crowd(server.port) as crowd:
            pid = server.process.pid
            alone = measure_active(server.port, pid)
            before = memory_kib(pid)
            crowd.add(1000, kind)
            settle(server.port)
            assert 0.5 < (memory_kib(pid) - before) / 1000 < MAX_KIB, kind
            beside = measure_active(server.port, pid)
            assert beside["server_us_per_event"] < 1.5 * alone["server_us_per_event"]
            assert crowd.num_closed() == 0


def test_the_bucket_of_a_share_of_turns():
    before = {0.001: 10.0, 0.05: 10.0, 0.2: 10.0, float("inf"): 10.0}
    after = {0.001: 1008.0, 0.05: 1009.0, 0.2: 1010.0, float("inf"): 1010.0}
    assert lag_ms(before, after) == {"num_turns": 1000.0, "lag_p999_ms": 50.0, "lag_max_ms": 200.0}


def test_the_loop_is_never_late():
    """B-22: prompts of 100,000 tokens and 500 requests within a second beside running streams."""
    for name, window in measure(1, ("long_prompts", "burst")).items():
        assert window["lag_p999_ms"] <= MAX_P999_MS, (name, window)
        assert window["lag_max_ms"] <= MAX_MS, (name, window)
