"""Requests that are told once, at their end: the same results, without a word before."""

import asyncio

from oneloop import SamplingParams
from oneloop.engine.outputs import SequenceDelta

PARAMS = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, logprobs=2, stop=["q"])


async def read(stream):
    """The stream's deltas, and how often each sequence was told."""
    told, times = {}, {}
    async with stream:
        async for deltas in stream:
            for delta in deltas:
                times[delta.index] = times.get(delta.index, 0) + 1
                if delta.index in told:
                    told[delta.index].merge(delta)
                else:
                    told[delta.index] = SequenceDelta.of(delta)
    return told, times


async def test_says_at_the_end_what_was_said_step_by_step(kit):
    async with kit.running_engine(kit.FakeExecutor(delay_s=0.002)) as engine:
        expected, often = await read(await engine.submit("tell me", PARAMS))
        stream = await engine.submit("tell me", PARAMS, final_only=True)
        told, once = await read(stream)
        assert told == expected
        assert once == {0: 1, 1: 1, 2: 1}
        assert sum(often.values()) > 10
        assert stream.num_generated_tokens == sum(len(delta.token_ids) for delta in told.values())
        assert stream.num_cached_tokens == 4  # of the first request's prompt
        assert stream.times.queue_s is not None
        assert stream.times.first_token is None


async def test_an_abort_and_a_failed_step_end_it(kit):
    executor = kit.FakeExecutor(delay_s=0.002, fail_on=lambda number: number == 20)
    async with kit.running_engine(executor) as engine:
        stream = await engine.submit("stop it", SamplingParams(max_tokens=400), final_only=True)
        asyncio.get_running_loop().call_later(0.01, stream.abort)
        told, _ = await read(stream)
        assert (told[0].finish_reason, told[0].text) == ("abort", "")
        stream = await engine.submit(
            "break it", SamplingParams(temperature=0, max_tokens=400), final_only=True
        )
        told, _ = await read(stream)
        assert (told[0].finish_reason, told[0].error) == ("error", "the step failed")
        assert told[0].text == kit.greedy_text("break it", len(told[0].text)) != ""


async def test_the_prefix_cache_is_forgotten_unless_blocks_are_held(kit):
    executor = kit.FakeExecutor()
    async with kit.running_engine(executor) as engine:
        params = SamplingParams(temperature=0, max_tokens=4)
        await read(await engine.submit("a prompt of some length", params))
        stream = await engine.submit("a prompt of some length", params)
        await read(stream)
        assert stream.num_cached_tokens > 0
        assert engine.reset_prefix_cache()
        assert engine.stats().num_cached_blocks == 0
        stream = await engine.submit("a prompt of some length", params)
        await read(stream)
        assert stream.num_cached_tokens == 0
        executor.gate.clear()
        stream = await engine.submit("another prompt", params)
        while not engine.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not engine.reset_prefix_cache()
        executor.gate.set()
        await read(stream)
