"""Start, drain, failed steps, overdue steps, death: what clients see, and that nothing hangs."""

import asyncio
import random
import threading
import time

import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.config import EngineConfig
from oneloop.errors import EngineClosedError, EngineDeadError, GenerationError, ModelError, OverloadedError
from oneloop_core import Core

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8)


async def text_of(stream):
    text, last = "", None
    async for deltas in stream:
        for delta in deltas:
            text, last = text + delta.text, delta
    return text, last


async def test_before_start_and_after_shutdown(kit):
    executor = kit.FakeExecutor()
    engine = AsyncEngine(EngineConfig(), executor=executor, tokenizer=kit.ByteTokenizer())
    assert engine.health().state == "loading"
    with pytest.raises(EngineDeadError, match="loading"):
        await engine.submit("x")
    await engine.start()
    assert engine.health().ok
    await engine.shutdown()
    await engine.shutdown()
    assert executor.is_shut_down
    assert engine.health().state == "stopped"
    with pytest.raises(EngineClosedError, match="stopped"):
        await engine.submit("x")


async def test_the_core_is_made_off_the_loop(kit, monkeypatch):
    """A pool of as many blocks as a large machine's memory has takes longer than the loop may be held."""
    threads = []

    def make(*arguments):
        threads.append(threading.current_thread())
        return Core(*arguments)

    monkeypatch.setattr("oneloop.engine.assembly.Core", make)
    async with kit.running_engine():
        assert [thread is threading.main_thread() for thread in threads] == [False]


async def test_a_model_that_does_not_load(kit):
    executor = kit.FakeExecutor(fail_start=ModelError("model.gguf", "truncated", item="blk.0"))
    engine = AsyncEngine(EngineConfig(), executor=executor, tokenizer=kit.ByteTokenizer())
    with pytest.raises(ModelError, match=r"model.gguf: blk.0: truncated"):
        await engine.start()
    assert not engine.health().ok
    await engine.shutdown()
    assert executor.is_shut_down


async def test_shutdown_without_drain_aborts_at_once(kit):
    async with kit.running_null_engine(step_ms=5) as engine:
        stream = await engine.submit("cut", LONG)
        await stream.next_deltas()
        begin = time.monotonic()
        await engine.shutdown()
        assert time.monotonic() - begin < 1
        _, last = await text_of(stream)
        assert last.finish_reason == "abort"


async def test_shutdown_with_drain_lets_them_finish(kit):
    executor = kit.FakeExecutor(delay_s=0.002)
    async with kit.running_engine(executor) as engine:
        streams = [await engine.submit(f"drain {number}", SHORT) for number in range(12)]
        readers = [asyncio.create_task(text_of(stream)) for stream in streams]
        draining = asyncio.create_task(engine.shutdown(drain_timeout=10))
        await asyncio.sleep(0)
        assert engine.health().state == "draining"
        with pytest.raises(OverloadedError, match="shutting down"):
            await engine.submit("too late", SHORT)
        found = await asyncio.gather(*readers)
        await draining
    assert [text for text, _ in found] == [kit.greedy_text(f"drain {number}", 8) for number in range(12)]
    assert {last.finish_reason for _, last in found} == {"length"}


async def test_a_drain_has_an_end_and_a_second_call_ends_it(kit):
    for second_call in (False, True):
        async with kit.running_null_engine(step_ms=10) as engine:
            stream = await engine.submit("endless", LONG)
            begin = time.monotonic()
            draining = asyncio.create_task(engine.shutdown(drain_timeout=60 if second_call else 0.1))
            await asyncio.sleep(0.05)
            if second_call:
                await engine.shutdown()
            await draining
            assert time.monotonic() - begin < 2
            _, last = await text_of(stream)
            assert last.finish_reason == "abort"


async def test_a_failed_step_ends_its_own_requests_only(kit):
    """Step 3 and its follower in flight fail for what they hold; what is submitted later never notices."""
    executor = kit.FakeExecutor(fail_on=lambda step: step == 3)
    async with kit.running_engine(executor) as engine:
        with pytest.raises(GenerationError, match="the step failed"):
            async for _ in engine.generate("victim", LONG):
                pass
        assert engine.health().ok
        text, last = await text_of(await engine.submit("victim", SHORT))
        assert (text, last.finish_reason) == (kit.greedy_text("victim", 8), "length")
        assert engine.metrics.request_success["error"] == 1


async def test_requests_outside_the_failed_step_go_on(kit):
    """One row: the running request fails, the waiting one runs and is right."""
    executor = kit.FakeExecutor(fail_on=lambda step: step == 4)
    async with kit.running_engine(executor, max_num_seqs=1) as engine:
        victim = await engine.submit("victim", LONG)
        waiting = await engine.submit("neighbour", SHORT)
        _, failed = await text_of(victim)
        text, last = await text_of(waiting)
    assert (failed.finish_reason, failed.error) == ("error", "the step failed")
    assert (text, last.finish_reason) == (kit.greedy_text("neighbour", 8), "length")


async def test_whatever_ends_well_around_failed_steps_is_right(kit):
    """Shared prefixes, chunks, forks' copies: nobody reads what a failed step did not write."""
    draw = random.Random(11)
    executor = kit.FakeExecutor(fail_on=lambda step: step % 7 == 3, num_blocks=60)
    jobs = [(f"{'a shared prefix of several blocks ' * draw.randint(0, 2)}{number % 6}", draw.randint(1, 12))
            for number in range(120)]  # fmt: skip

    async def one(engine, prompt, num_tokens):
        text, last = await text_of(
            await engine.submit(prompt, SamplingParams(temperature=0, max_tokens=num_tokens))
        )
        if last.finish_reason == "length":
            assert text == kit.greedy_text(prompt, num_tokens)
        return last.finish_reason

    async with kit.running_engine(executor) as engine:
        reasons = await asyncio.gather(*(one(engine, *job) for job in jobs))
    assert set(reasons) == {"length", "error"}


async def test_a_result_out_of_range_fails_the_step_not_the_engine(kit):
    executor = kit.FakeExecutor(
        choose=lambda history, seed, index: 10**6 if bytes(history[:3]) == b"bad" else 120
    )
    async with kit.running_engine(executor) as engine:
        _, last = await text_of(await engine.submit("bad one", SHORT))
        assert last.finish_reason == "error"
        text, last = await text_of(await engine.submit("good one", SHORT))
        assert text == "xxxxxxxx"


async def test_every_step_failing_never_wedges(kit):
    executor = kit.FakeExecutor(fail_on=lambda step: True)
    async with kit.running_engine(executor) as engine:
        streams = [await engine.submit(f"doomed {number}", SHORT) for number in range(20)]
        found = await asyncio.gather(*(text_of(stream) for stream in streams))
    assert {last.finish_reason for _, last in found} == {"error"}


async def test_an_overdue_step_is_death(kit):
    executor = kit.FakeExecutor()
    async with kit.running_engine(executor, step_timeout_s=0.2) as engine:
        executor.gate.clear()
        streams = [await engine.submit(f"stuck {number}", SHORT) for number in range(3)]
        async with asyncio.timeout(5):
            reason = await engine.wait_dead()
            found = [await text_of(stream) for stream in streams]
        assert "did not complete within 0.2 s" in reason
        assert {last.finish_reason for _, last in found} == {"error"}
        assert engine.health().state == "dead"
        assert not engine.health().ok
        with pytest.raises(EngineDeadError, match="did not complete"):
            await engine.submit("x", SHORT)


async def test_a_process_that_was_stopped_gives_its_step_time_again(kit, monkeypatch):
    monkeypatch.setattr("oneloop.engine.loop._STOOD_STILL_S", 0.2)
    executor = kit.FakeExecutor()
    async with kit.running_engine(executor, step_timeout_s=0.3) as engine:
        executor.gate.clear()
        stream = await engine.submit("paused", SHORT)
        await asyncio.sleep(0.01)
        time.sleep(0.8)  # noqa: ASYNC251  # nothing runs, as after SIGSTOP
        await asyncio.sleep(0.1)
        assert engine.health().ok
        executor.gate.set()
        text, _ = await text_of(stream)
        assert text == kit.greedy_text("paused", 8)
        executor.gate.clear()
        await engine.submit("stuck", SHORT)
        assert "did not complete" in await asyncio.wait_for(engine.wait_dead(), 5)


async def test_a_slow_sequence_of_steps_is_no_false_alarm(kit):
    """Two steps in flight: the second one's clock starts when the first has completed."""
    executor = kit.FakeExecutor(delay_s=0.4)
    async with kit.running_engine(executor, step_timeout_s=0.7) as engine:
        text, _ = await text_of(await engine.submit("slow", SamplingParams(temperature=0, max_tokens=4)))
        assert engine.health().ok
    assert executor.max_waiting == 2
    assert text == kit.greedy_text("slow", 4)


@pytest.mark.parametrize("broken", ["schedule", "commit", "submit"])
async def test_a_fault_inside_the_loop_ends_every_stream_with_one_error(kit, broken):
    class Broken:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            if name == broken:
                raise ValueError("/secret/path of a fault")
            return getattr(self._inner, name)

    async with kit.running_null_engine(step_ms=1) as engine:
        streams = [await engine.submit(f"stream {number}", LONG) for number in range(5)]
        await streams[0].next_deltas()
        if broken == "submit":
            engine._step_loop._executor = Broken(engine._step_loop._executor)
        else:
            engine._step_loop._core = Broken(engine._step_loop._core)
        async with asyncio.timeout(5):
            found = [await text_of(stream) for stream in streams]
        for _, last in found:
            assert last.finish_reason == "error"
            assert "secret" not in last.error
        assert engine.health().state == "dead"
        assert "ValueError" in engine.health().reason


async def test_shutdown_of_a_dead_engine_does_not_hang(kit):
    executor = kit.FakeExecutor()
    async with kit.running_engine(executor, step_timeout_s=0.05) as engine:
        executor.gate.clear()
        await engine.submit("stuck", SHORT)
        await engine.wait_dead()
        async with asyncio.timeout(10):
            await engine.shutdown(drain_timeout=5)
        assert engine.health().state == "dead"
