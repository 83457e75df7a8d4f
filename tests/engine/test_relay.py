"""The relay's place in the engine: which streams it takes, what they get back, and its turns of the loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from oneloop import SamplingParams
from oneloop.engine import relay as module
from oneloop.engine.metrics import EngineMetrics
from oneloop.engine.relay import Relay, TextFrame
from oneloop.engine.stream import RequestStream


class FakeRelay:
    """Takes every stream, unless it has no descriptor left; gives back what it is told to."""

    def __init__(self):
        self.attached = []
        self.left = (b"", 0, 100.0)
        self.is_exhausted = False

    def attach(self, handle, fd, frame, *, chunked, last_token_at):
        if self.is_exhausted:
            raise OSError(24, "too many open files")
        self.attached.append((handle, fd, chunked, last_token_at))

    def detach(self, handle):
        return self.left


@pytest.fixture
def relay():
    return FakeRelay()


def delta(tokens, index=0, finish=None):
    return SimpleNamespace(
        index=index, text="x" * len(tokens), token_ids=tokens, finish_reason=finish, logprobs=None, stop_reason=None,
        error=None, is_request_at_fault=False,
        queue_s=None, num_cached_tokens=0, prompt_logprobs=None, pooled=None, cumulative_logprob=None,
    )  # fmt: skip


@pytest.fixture
async def make_stream(relay):
    made = []

    def make(n=1, **more):
        settings = {"num_sequences": n, "relay": relay, "metrics": EngineMetrics(), **more}
        stream = RequestStream(
            handle=7, request_id="r", prompt="p", prompt_token_ids=[1], arrived=90.0, on_end=lambda _: None,
            **settings,
        )  # fmt: skip
        made.append(stream)
        return stream

    yield make
    for stream in made:
        stream.abort()


def begun(stream):
    """With its first token, which was taken."""
    stream.push(delta([1]), 100.0)
    stream.take()
    return stream


def relays(stream):
    return stream.relay_text(5, TextFrame(b"{", b"}"), chunked=True)


async def test_a_stream_whose_text_was_taken_is_relayed(make_stream, relay):
    assert relays(begun(make_stream()))
    assert relay.attached == [(7, 5, True, 100.0)]


async def test_who_is_not_relayed(make_stream, relay):
    assert not relays(make_stream()), "no token has come"
    assert not relays(begun(make_stream(relay=None)))
    assert not relays(begun(make_stream(final_only=True)))
    assert not relays(begun(make_stream(n=2)))
    waiting = begun(make_stream())
    waiting.push(delta([2]), 101.0)
    assert not relays(waiting), "something goes before"
    ended = begun(make_stream())
    ended.push(delta([2], finish="length"), 101.0)
    ended.take()
    assert not relays(ended)
    relay.is_exhausted = True
    assert not relays(begun(make_stream()))
    assert relay.attached == []


async def test_what_was_not_sent_comes_back_once_and_in_order(make_stream, relay):
    """However often it is attached before somebody takes it."""
    stream, news = begun(make_stream()), []
    stream.call_on_news(news.append)
    for number, unsent in enumerate((b"a", b"b")):
        assert relays(stream)
        relay.left = (unsent, 3, 110.0 + number)
        stream.stalled()
        stream.stalled()
    assert len(news) == 2, "told once each"
    assert stream.num_generated_tokens == 1 + 2 * 3
    assert (stream.take_unsent(), stream.take_unsent()) == (b"ab", b"")
    stream.push(delta([9], finish="length"), 115.0)
    assert stream.times.last_token == 115.0
    assert stream.num_generated_tokens == 8


async def test_gaps_go_on_where_the_relay_has_left_off(make_stream, relay):
    stream = begun(make_stream())
    assert relays(stream)
    relay.left = (b"", 5, 130.0)
    stream.push(delta([9]), 132.0)
    metrics = stream._metrics.inter_token_latency_seconds
    assert (metrics.count, metrics.total) == (1, 2.0)


class FakeCore:
    """As StreamRelay, with so many slices of work."""

    def __init__(self):
        self.num_slices = 0
        self.calls = []

    def attach(self, *_, **__):
        pass

    def deliver(self, deltas, now):
        return []

    def take_gaps(self):
        return [0] * (len(module.SHORT_S) + 1), 0.0

    def send(self, max_s):
        self.calls.append(max_s)
        self.num_slices -= 1
        return [], self.num_slices > 0


async def test_a_slice_a_turn_however_much_comes(monkeypatch):
    core = FakeCore()
    monkeypatch.setattr(module, "StreamRelay", lambda _: core)
    relay = Relay(EngineMetrics(), lambda _: None)
    relay.attach(7, 5, TextFrame(b"", b""), chunked=True, last_token_at=0.0)
    core.num_slices = 6
    counts = []
    for _ in range(8):
        relay.deliver([], 1.0)
        before = len(core.calls)
        await asyncio.sleep(0)
        counts.append(len(core.calls) - before)
    assert counts == [1] * 8
    assert core.calls == [module.SLICE_S] * 8
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(core.calls) == 8, "nothing is left, so nothing is sent"


async def test_the_executors_descriptor_is_urgent_while_steps_run(kit):
    async with kit.running_null_engine() as engine:
        async with await engine.submit("a", SamplingParams(max_tokens=2)) as stream:
            await stream.all_deltas()
        urgent = engine.metrics.loop.urgent
        assert urgent == {engine._executor.completion_fd()}
    assert urgent == set()
