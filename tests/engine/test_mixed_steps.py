"""How many tokens a step may hold beside running streams: where the number comes from, and that it holds."""

from __future__ import annotations

import logging

import pytest

from oneloop import SamplingParams


@pytest.mark.parametrize(
    ("settings", "quick_step_tokens", "expected"),
    [
        ({}, None, 64),
        ({}, 16, 16),
        ({}, 1024, 64),
        ({"mixed_step_tokens": 24}, 16, 24),
        ({"mixed_step_tokens": 100}, None, 64),
    ],
)
async def test_the_setting_goes_before_the_device_and_the_log_says_it(
    kit, caplog, settings, quick_step_tokens, expected
):
    executor = kit.FakeExecutor(quick_step_tokens=quick_step_tokens)
    with caplog.at_level(logging.INFO, "oneloop.engine.assembly"):
        async with kit.running_engine(executor, **settings) as engine:
            assert engine._loaded().core.config.mixed_step_tokens == expected
    assert f"steps of up to 64 tokens, {expected} while streams are running" in caplog.text


async def test_prompts_leave_streams_room(kit):
    executor = kit.FakeExecutor()
    async with kit.running_engine(executor, mixed_step_tokens=20) as engine:
        endless = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        stream = await engine.submit("a", endless)
        await anext(aiter(stream))
        before = len(executor.steps)
        prompt = "b" * 150
        other = await engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        async for _ in other:
            pass
        sizes = [step.num_tokens for step in executor.steps[before:]]
    assert max(sizes) == 20
    assert sum(sizes) > 150
