"""A step that the device has no memory for ends its own requests; what comes after is served as before (B-20)."""

from __future__ import annotations

import asyncio

import pytest
import torch

from oneloop import AsyncEngine, SamplingParams
from oneloop.worker.gpu.runner import GpuModelRunner

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


async def answer(engine: AsyncEngine, number: int) -> tuple[str | None, list[int]]:
    """How the request ended, and its tokens."""
    stream = await engine.submit({"prompt_token_ids": [number + i for i in range(20)]}, PARAMS)
    async with stream:
        tokens = [token async for deltas in stream for delta in deltas for token in delta.token_ids]
    return stream.finish_reason, tokens


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
async def test_only_the_steps_own_requests_end(tiny_checkpoint, monkeypatch, enforce_eager):
    engine = AsyncEngine.from_settings(
        str(tiny_checkpoint), device="cuda", enforce_eager=enforce_eager, max_num_seqs=8
    )
    async with engine:
        expected = await asyncio.gather(*(answer(engine, number) for number in range(8)))
        assert {reason for reason, _ in expected} == {"length"}
        launch, count = GpuModelRunner._launch_forward, 0

        def short_of_memory(self, *arguments):
            nonlocal count
            count += 1
            if count == 3:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            launch(self, *arguments)

        monkeypatch.setattr(GpuModelRunner, "_launch_forward", short_of_memory)
        if not enforce_eager:
            # The graphs' keys are made anew, so that the launch above is what runs.
            monkeypatch.setattr("oneloop.worker.gpu.runner.MAX_CAPTURED_TOKENS", 0)
            engine._executor._runner.graphs._graphs.clear()
            engine._executor._runner.graphs._seen.clear()
        hit = await asyncio.gather(*(answer(engine, number) for number in range(8)))
        assert "error" in {reason for reason, _ in hit}
        monkeypatch.undo()
        assert engine.health().ok
        assert await asyncio.gather(*(answer(engine, number) for number in range(8))) == expected
        engine._loaded().core.audit()
