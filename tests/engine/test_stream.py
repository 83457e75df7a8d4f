"""RequestStream: hand-over, merging, waiting, aborting. Without a core."""

import asyncio
from types import SimpleNamespace

import pytest

from oneloop.engine.metrics import EngineMetrics
from oneloop.engine.stream import RequestStream


def delta(index=0, text="", tokens=(), finish=None, **more):
    fields = {
        "logprobs": None,
        "stop_reason": None,
        "error": None,
        "is_request_at_fault": False,
        "queue_s": None,
        "prompt_logprobs": None,
        "pooled": None,
        "cumulative_logprob": None,
        "num_cached_tokens": 0,
        **more,
    }
    return SimpleNamespace(index=index, text=text, token_ids=list(tokens), finish_reason=finish, **fields)


class Stream:
    def __init__(self, n=1):
        self.ended = []
        self.metrics = EngineMetrics()
        self.stream = RequestStream(
            handle=7, request_id="r", prompt="p", prompt_token_ids=[1, 2], num_sequences=n, arrived=100.0,
            metrics=self.metrics, on_end=self.ended.append,
        )  # fmt: skip


async def test_a_slow_consumer_finds_merged_deltas():
    test = Stream(n=2)
    for step in range(10_000):
        if step % 500 == 0:
            await asyncio.sleep(0)
        test.stream.push(delta(0, "a", [step]), 101.0)
        test.stream.push(delta(1, "b", [step], logprobs=[(1, [(step, -0.5)])]), 101.0)
    first, second = await test.stream.next_deltas()
    assert (first.text, first.token_ids) == ("a" * 10_000, list(range(10_000)))
    assert len(second.logprobs) == 10_000
    assert first.finish_reason is None
    test.stream.abort()


async def test_merging_leaves_what_came_as_it_was():
    test = Stream()
    came = [delta(0, text, [token], logprobs=[(1, [(token, -0.5)])]) for token, text in enumerate("abc")]
    for one in came:
        test.stream.push(one, 101.0)
    (merged,) = test.stream.take()
    assert (merged.text, merged.token_ids, len(merged.logprobs)) == ("abc", [0, 1, 2], 3)
    assert [(one.text, one.token_ids, len(one.logprobs)) for one in came] == [
        (text, [token], 1) for token, text in enumerate("abc")
    ]
    test.stream.abort()


async def test_the_end_comes_with_the_last_text():
    test = Stream(n=2)
    test.stream.push(delta(0, "x", [5], finish="stop", stop_reason="end"), 101.0)
    assert not test.stream.finished
    test.stream.push(delta(1, "y", [6]), 102.0)
    test.stream.push(delta(1, "z", [7], finish="length"), 103.0)
    assert test.stream.finished
    assert test.ended == [test.stream]
    found = [item async for item in test.stream]
    assert [(d.text, d.finish_reason, d.stop_reason) for d in found[0]] == [
        ("x", "stop", "end"),
        ("yz", "length", None),
    ]
    assert len(found) == 1
    assert test.stream.finish_reason == "length"
    assert test.stream.num_generated_tokens == 3


async def test_all_deltas_wakes_once_at_the_end():
    test = Stream(n=2)
    reader = asyncio.create_task(test.stream.all_deltas())
    await asyncio.sleep(0)
    for step in range(5):
        test.stream.push(delta(0, "a", [step]), 101.0)
        test.stream.push(delta(1, "b", [step], finish="length" if step == 4 else None), 101.0)
        await asyncio.sleep(0)
        assert not reader.done()
    test.stream.push(delta(0, "c", [5], finish="stop"), 102.0)
    first, second = await reader
    assert (first.text, first.finish_reason) == ("aaaaac", "stop")
    assert (second.text, second.finish_reason) == ("bbbbb", "length")
    assert await test.stream.all_deltas() == []


async def test_all_deltas_ends_with_an_abort():
    test = Stream()
    reader = asyncio.create_task(test.stream.all_deltas())
    await asyncio.sleep(0)
    test.stream.push(delta(0, "a", [1]), 101.0)
    test.stream.abort()
    assert [(d.text, d.finish_reason) for d in await reader] == [("a", "abort")]


async def test_cancelling_the_wait_loses_nothing_and_aborts_nothing():
    test = Stream()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(test.stream.next_deltas(), 0.01)
    assert test.ended == []
    test.stream.push(delta(0, "late", [1]), 101.0)
    assert (await test.stream.next_deltas())[0].text == "late"
    test.stream.abort()


async def test_a_cancelled_iteration_aborts_at_once():
    test = Stream()

    async def consume():
        async for _ in test.stream:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert test.ended == [test.stream]
    assert test.stream.finish_reason == "abort"


async def test_leaving_the_context_aborts_and_later_deltas_are_dropped():
    test = Stream()
    async with test.stream as stream:
        stream.push(delta(0, "one", [1]), 101.0)
    assert test.ended == [test.stream]
    test.stream.push(delta(0, "two", [2]), 102.0)
    test.stream.abort()
    assert test.ended == [test.stream]
    (left,) = await test.stream.next_deltas()
    assert (left.text, left.finish_reason) == ("one", "abort")
    assert await test.stream.next_deltas() == []


async def test_a_reader_that_is_called():
    """At once where something waits; then once per take, however much comes; at the end too."""
    test, calls = Stream(n=2), []
    test.stream.push(delta(0, "a", [1]), 101.0)
    test.stream.call_on_news(calls.append)
    assert calls == [test.stream]
    test.stream.push(delta(1, "b", [2]), 101.0)
    test.stream.push(delta(0, "c", [3]), 102.0)
    assert len(calls) == 1
    assert [(d.index, d.text, d.token_ids) for d in test.stream.take()] == [(0, "ac", [1, 3]), (1, "b", [2])]
    assert test.stream.take() == []
    test.stream.push(delta(1, "d", [4], finish="stop"), 103.0)
    assert len(calls) == 2
    assert [(d.text, d.finish_reason) for d in test.stream.take()] == [("d", "stop")]
    test.stream.abort()
    assert len(calls) == 3
    assert [(d.index, d.finish_reason) for d in test.stream.take()] == [(0, "abort")]
    test.stream.push(delta(0, "late", [5]), 104.0)
    test.stream.abort()
    assert len(calls) == 3


async def test_the_consumer_wakes_when_something_comes():
    test = Stream()
    waiting = asyncio.create_task(test.stream.next_deltas())
    await asyncio.sleep(0)
    test.stream.push(delta(0, "now", [1]), 101.0)
    assert (await waiting)[0].text == "now"
    waiting = asyncio.create_task(test.stream.next_deltas())
    await asyncio.sleep(0)
    test.stream.end("error", "the step failed")
    (last,) = await waiting
    assert (last.finish_reason, last.error) == ("error", "the step failed")


async def test_times_and_counts_reach_the_metrics():
    test = Stream()
    test.stream.push(delta(0, "a", [1], queue_s=0.25, num_cached_tokens=2), 101.0)
    test.stream.push(delta(0, "bc", [2, 3], finish="stop"), 103.0)
    metrics = test.metrics
    assert test.stream.num_cached_tokens == 2
    assert (metrics.time_to_first_token_seconds.count, metrics.time_to_first_token_seconds.total) == (1, 1.0)
    assert (metrics.inter_token_latency_seconds.count, metrics.inter_token_latency_seconds.total) == (2, 2.0)
    assert metrics.request_queue_time_seconds.total == 0.25
    assert metrics.request_prefill_time_seconds.total == 0.75
    assert metrics.request_decode_time_seconds.total == 2.0
    assert metrics.request_generation_tokens.total == 3
    assert metrics.request_success == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_histogram_buckets_are_cumulative_and_inclusive():
    histogram = EngineMetrics().request_params_n
    for value in (1, 2, 3, 100):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [(1, 1), (2, 2), (5, 3), (10, 3), (20, 3), (float("inf"), 4)]
    assert (histogram.count, histogram.total) == (4, 106)


def test_what_was_counted_elsewhere_is_added():
    histogram = EngineMetrics().request_params_n
    histogram.observe(2)
    histogram.add([1, 0, 3, 0, 0, 1], 40.0)
    histogram.add([2, 0, 0, 0, 0, 0], 0.0)  # tokens that came at the same time
    histogram.add([0] * 6, 0.0)
    assert [count for _, count in histogram.cumulative()] == [3, 4, 7, 7, 7, 8]
    assert histogram.total == 42.0
