"""The event loop never waits for the device: torch's sync debug mode raises, and explicit calls are counted."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
import torch

from oneloop import AsyncEngine, SamplingParams
from oneloop.engine.params import BeamSearch
from oneloop.engine.pooling import pooling_params

pytestmark = pytest.mark.gpu

KINDS = (
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=30, max_tokens=40, ignore_eos=True, n=2),
    SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.1, max_tokens=40, ignore_eos=True
    ),
    SamplingParams(temperature=0.0, logprobs=5, logit_bias={7: 2.0}, min_tokens=3, max_tokens=40),
    SamplingParams(temperature=0.0, prompt_logprobs=5, max_tokens=8),
    SamplingParams(n=3, max_tokens=8, beam_search=BeamSearch()),
    pooling_params("mean"),
    pooling_params("last"),
)
CALLS = (
    (torch.Tensor, ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")),
    (torch.cuda, ("synchronize",)),
    (torch.cuda.Stream, ("synchronize",)),
    (torch.cuda.Event, ("synchronize",)),
)


def count_calls(monkeypatch) -> Counter[str]:
    """Calls that wait, or would for a tensor on the device, on this thread."""
    counted: Counter[str] = Counter()
    thread = threading.get_ident()
    for owner, names in CALLS:
        for name in names:
            call = getattr(owner, name)

            def counting(*arguments, _call=call, _name=f"{owner.__name__}.{name}", **options):
                on_device = (
                    not isinstance(arguments[0] if arguments else None, torch.Tensor) or arguments[0].is_cuda
                )
                if threading.get_ident() == thread and on_device:
                    counted[_name] += 1
                return _call(*arguments, **options)

            monkeypatch.setattr(owner, name, counting)
    return counted


async def complete(engine: AsyncEngine, number: int) -> int:
    prompt = {"prompt_token_ids": [(number * 7 + i) % 250 for i in range(3 + number % 90)]}
    stream = await engine.submit(prompt, KINDS[number % len(KINDS)])
    async with stream:
        ends = [delta.finish_reason async for deltas in stream for delta in deltas]
        return len([reason for reason in ends if reason in ("stop", "length")])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
async def test_nothing_waits_for_the_device(tiny_checkpoint, monkeypatch, enforce_eager):
    engine = AsyncEngine.from_settings(
        str(tiny_checkpoint),
        device="cuda",
        enforce_eager=enforce_eager,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=1024,
    )
    async with engine:
        # Once before: compiling a kernel may load its code, which waits.
        await asyncio.gather(*(complete(engine, number) for number in range(64)))
        counted = count_calls(monkeypatch)
        try:
            torch.cuda.set_sync_debug_mode("error")
            numbers = await asyncio.gather(*(complete(engine, number) for number in range(200)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
        assert all(numbers)
        assert not counted
        assert engine.stats().num_steps > 100
