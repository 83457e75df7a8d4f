"""Idle work: done while no request is there, in turns that the loop does not notice, and never while one is."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace

from oneloop.engine import idle
from oneloop.engine.idle import IdleWork
from oneloop.engine.params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


async def text_of(engine, prompt="hello"):
    async for output in engine.generate(prompt, PARAMS):
        last = output
    return last.outputs[0].text


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_all_is_prepared_while_nobody_asks(kit):
    executor = kit.FakeExecutor(to_prepare=40)
    async with kit.running_engine(executor) as engine:
        await until(lambda: not executor.to_prepare)
        await asyncio.sleep(3 * idle.PAUSE_S)
        assert len(executor.prepared) == 40
        assert engine.metrics.loop.parts["prepare"] >= 40 * executor.prepare_s
        executor.to_prepare = 3  # as steps of a new kind leave something to prepare
        await asyncio.sleep(3 * idle.PAUSE_S)
        assert executor.to_prepare == 3, "nothing is asked for again before a step has run"
        assert await text_of(engine) == kit.greedy_text("hello", 12)
        await until(lambda: not executor.to_prepare)


async def test_the_loop_turns_between_the_pieces(kit):
    executor = kit.FakeExecutor(to_prepare=10, prepare_s=0.025)
    async with kit.running_engine(executor):
        gaps, last = [], time.monotonic()
        while executor.to_prepare:
            await asyncio.sleep(0)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
        between = [later - earlier for earlier, later in pairwise(executor.prepared)]
        assert min(between) >= executor.prepare_s + 0.9 * idle.PAUSE_S, "one long piece a turn, then a pause"
        assert len(gaps) > 100, "the loop turns meanwhile"


async def test_short_pieces_share_a_turn(kit):
    executor = kit.FakeExecutor(to_prepare=60, prepare_s=0.001)
    async with kit.running_engine(executor):
        began = time.monotonic()
        await until(lambda: not executor.to_prepare)
        assert time.monotonic() - began < 60 * idle.PAUSE_S / 2


async def test_a_request_stops_it_at_once(kit):
    executor = kit.FakeExecutor(to_prepare=10_000, delay_s=0.01)
    async with kit.running_engine(executor) as engine:
        await until(lambda: executor.prepared)
        before = time.monotonic()
        assert await text_of(engine) == kit.greedy_text("hello", 12)
        after = time.monotonic()
        during = [moment for moment in executor.prepared if before + idle.TURN_S < moment < after]
        assert during == []
        assert executor.to_prepare
        count = len(executor.prepared)
        await until(lambda: len(executor.prepared) > count)
    assert executor.faults == []


async def test_a_client_that_asks_again_at_once_meets_none(kit):
    executor = kit.FakeExecutor(to_prepare=10_000)
    async with kit.running_engine(executor) as engine:
        for _ in range(20):
            await text_of(engine)
        assert executor.prepared == []


async def test_none_while_a_request_is_tokenised(kit, monkeypatch):
    executor = kit.FakeExecutor(to_prepare=10_000)
    encode = kit.ByteTokenizer.encode

    def slowly(self, text, *, add_special_tokens=True):
        time.sleep(0.2)
        return encode(self, text, add_special_tokens=add_special_tokens)

    async with kit.running_engine(executor) as engine:
        monkeypatch.setattr(kit.ByteTokenizer, "encode", slowly)
        began = time.monotonic()
        await text_of(engine)
        assert [moment for moment in executor.prepared if moment > began + idle.TURN_S] == []


async def test_a_fault_in_it_ends_the_engine_like_any_other(kit):
    executor = kit.FakeExecutor()

    def broken():
        raise RuntimeError("the device is gone")

    executor.prepare_in_idle = broken
    async with kit.running_engine(executor) as engine:
        async with asyncio.timeout(5):
            assert "RuntimeError" in await engine.wait_dead()


async def test_shutdown_ends_it(kit):
    executor = kit.FakeExecutor(to_prepare=10_000)
    async with kit.running_engine(executor):
        await until(lambda: executor.prepared)
    count = len(executor.prepared)
    await asyncio.sleep(3 * idle.PAUSE_S)
    assert len(executor.prepared) == count
    timers = [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]
    assert "IdleWork" not in str(timers), "nothing of it stays on the event loop"


async def test_none_between_a_submission_and_its_step(kit):
    executor = kit.FakeExecutor(to_prepare=10_000)
    async with kit.running_engine(executor) as engine:
        await until(lambda: executor.prepared)
        count = len(executor.prepared)
        engine._step_loop.wake()
        engine._step_loop._idle._turn()
        assert len(executor.prepared) == count


class Clock:
    """Timers that fire when they are told to."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay_s, callback):
        timer = SimpleNamespace(callback=callback, cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def fire(self):
        (timer,) = self.timers
        self.timers.clear()
        timer.callback()


def test_begin_twice_and_stop():
    calls, clock = [], Clock()
    work = IdleWork(clock, lambda: bool(calls.append(1)), lambda: True)
    work.begin()
    work.begin()
    clock.fire()
    assert (calls, clock.timers) == ([1], [])
    work.begin()
    work.stop()
    work.stop()
    assert clock.timers == []


def test_it_is_asked_before_each_piece_whether_it_is_still_idle():
    """Where it is not, it looks again after a pause: what came may have been refused."""
    moments, pieces, clock = [True, True, False, True, False], [], Clock()
    work = IdleWork(clock, lambda: not pieces.append(len(moments)), lambda: moments.pop(0))
    work.begin()
    clock.fire()
    assert pieces == [4, 3]
    clock.fire()
    assert pieces == [4, 3, 1]
    assert len(clock.timers) == 1
