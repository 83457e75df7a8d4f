"""Cancellation in every state (reliability.md B-28, B-04, B-05): the request ends at once, its blocks come back."""

import asyncio

import pytest

from oneloop import SamplingParams
from oneloop.errors import OverloadedError

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


async def first_delta(stream):
    async with asyncio.timeout(10):
        return await stream.next_deltas()


async def queued(engine, executor):
    """Another request occupies the only row; this one waits."""
    executor.gate.clear()
    blocker = await engine.submit("blocker", LONG)
    await asyncio.sleep(0.01)
    return await engine.submit("victim", LONG), blocker


async def in_prefill(engine, executor):
    executor.gate.clear()
    stream = await engine.submit("p" * 200, LONG)
    await asyncio.sleep(0.01)
    return stream, None


async def in_decode(engine, executor):
    stream = await engine.submit("victim", LONG)
    await first_delta(stream)
    return stream, None


async def finished(engine, executor):
    stream = await engine.submit("victim", SamplingParams(temperature=0, max_tokens=2))
    async for _ in stream:
        pass
    return stream, None


async def untaken(engine, executor):
    """It has ended, and nobody has looked."""
    stream = await engine.submit("victim", SamplingParams(temperature=0, max_tokens=2))
    async with asyncio.timeout(10):
        while not stream.finished:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return stream, None


async def by_stream(engine, stream):
    stream.abort()


async def by_id(engine, stream):
    was_live = not stream.finished
    assert engine.abort(stream.request_id) == was_live


async def by_leaving(engine, stream):
    async with stream:
        pass


async def by_cancel(engine, stream):
    async def consume():
        async for _ in stream:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("cancel", [by_stream, by_id, by_leaving, by_cancel])
@pytest.mark.parametrize("state", [queued, in_prefill, in_decode, finished, untaken])
async def test_every_state_times_every_way(kit, state, cancel):
    executor = kit.FakeExecutor(delay_s=0.001)
    async with kit.running_engine(executor, max_num_seqs=1) as engine:
        stream, other = await state(engine, executor)
        was_live = not stream.finished
        await cancel(engine, stream)
        assert stream.finished
        assert stream.finish_reason == ("abort" if was_live else "length")
        assert not engine.abort(stream.request_id)
        executor.gate.set()
        if other is not None:
            await first_delta(other)  # the neighbour goes on
            other.abort()
        await kit.settled(engine)
        kit.check_books(engine)
        after = [
            output async for output in engine.generate("golden", SamplingParams(temperature=0, max_tokens=8))
        ]
        assert after[-1].outputs[0].text == kit.greedy_text("golden", 8)


async def test_leaving_generate_early_aborts(kit):
    async with kit.running_null_engine() as engine:
        outputs = engine.generate("leave", LONG)
        async for _ in outputs:
            break
        await outputs.aclose()
        await kit.settled(engine)
        assert engine.metrics.request_success["abort"] == 1


async def test_a_mass_cancel_needs_no_further_request(kit):
    async with kit.running_null_engine(step_ms=2) as engine:
        streams = [await engine.submit(f"number {number}", LONG) for number in range(40)]
        await first_delta(streams[0])
        for stream in streams:
            stream.abort()
        assert engine.stats().num_waiting == 0
        await kit.settled(engine)
        assert engine.metrics.request_success["abort"] == 40


async def test_random_aborts_leave_the_others_whole(kit):
    import random

    draw = random.Random(3)
    executor = kit.FakeExecutor(num_blocks=40, delay_s=0.0005)

    async def one(engine, number):
        prompt = f"request {number % 9}"
        params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 40))
        stop_after = draw.choice([None, None, 0, 1, 5, 20])
        num_tokens = 0
        text = ""
        async with await engine.submit(prompt, params) as stream:
            async for deltas in stream:
                text += deltas[0].text
                num_tokens += len(deltas[0].token_ids)
                if stop_after is not None and num_tokens > stop_after:
                    return
        assert text == kit.greedy_text(prompt, params.max_tokens)

    async with kit.running_engine(executor) as engine:
        await asyncio.gather(*(one(engine, number) for number in range(150)))
        await kit.settled(engine)
        assert sum(engine.metrics.request_success.values()) == 150


async def test_the_queue_is_bounded(kit):
    async with kit.running_null_engine(step_ms=20, max_num_seqs=1, max_num_queued_reqs=3) as engine:
        streams = [await engine.submit("runs", LONG)]
        await asyncio.sleep(0.01)
        streams += [await engine.submit(f"waits {number}", LONG) for number in range(3)]
        with pytest.raises(OverloadedError, match="3 requests are waiting") as caught:
            await engine.submit("too many", LONG)
        assert caught.value.retry_after_s >= 1
        with pytest.raises(OverloadedError, match="3 requests are waiting"):
            engine.check_accepting()
        assert engine.metrics.rejected["overloaded"] == 2
        streams[1].abort()
        engine.check_accepting()
        streams.append(await engine.submit("fits again", LONG))
        for stream in streams:
            stream.abort()


async def test_a_consumer_that_does_not_read_keeps_bounded_memory(kit):
    async with kit.running_engine() as engine:
        stream = await engine.submit("slow", LONG)
        async with asyncio.timeout(20):
            while not stream.finished:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert len(stream._pending) == 1
        (delta,) = await stream.next_deltas()
        assert delta.text == kit.greedy_text("slow", 300)
        assert await stream.next_deltas() == []
