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


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # the one whose capture fails
@pytest.mark.parametrize("while_captured", [False, True], ids=["launch", "capture"])
async def test_only_the_steps_own_requests_end(tiny_checkpoint, monkeypatch, while_captured):
    """Short of memory in a launch, the step fails; in a capture, the step is launched without one."""
    engine = AsyncEngine.from_settings(
        str(tiny_checkpoint), device="cuda", max_num_seqs=8, num_gpu_blocks_override=128
    )
    async with engine:
        expected = await asyncio.gather(*(answer(engine, number) for number in range(8)))
        assert {reason for reason, _ in expected} == {"length"}
        launch, times = GpuModelRunner._launch_forward, 0

        def short_of_memory(self, *arguments):
            nonlocal times
            if not times and torch.cuda.is_current_stream_capturing() == while_captured:
                times += 1
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            launch(self, *arguments)

        monkeypatch.setattr(GpuModelRunner, "_launch_forward", short_of_memory)
        graphs = engine._executor._runner.graphs
        graphs._graphs.clear()  # so that steps are launched, and captured at their second use
        monkeypatch.setattr("oneloop.worker.gpu.graphs.RETRY_AFTER", 3)
        hit = await asyncio.gather(*(answer(engine, number) for number in range(8)))
        assert times == 1
        if while_captured:
            assert hit == expected
            assert list(graphs._attempts.values()) == [1], "no other capture fails for it"
        else:
            assert "error" in {reason for reason, _ in hit}
        monkeypatch.undo()
        assert engine.health().ok
        assert await asyncio.gather(*(answer(engine, number) for number in range(8))) == expected
        assert all(key in graphs._graphs for key in graphs._attempts), "captured once there is memory"
        assert len(graphs._graphs) > 3
        engine._loaded().core.audit()
