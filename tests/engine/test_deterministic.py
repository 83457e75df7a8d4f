"""A request's `deterministic` is a flag of the steps that hold it, where a server has steps of both kinds."""

from __future__ import annotations

from typing import Any

import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.config import EngineConfig
from oneloop.worker.inputs import StepFlag


@pytest.mark.parametrize(
    ("setting", "asks", "flagged"),
    [
        ("deterministic_requests", True, True),
        ("deterministic_requests", False, False),
        ("deterministic", True, False),  # all steps are of one kind: nothing to say
        ("deterministic", False, False),
    ],
)
async def test_steps_have_the_flag(kit: Any, setting: str, asks: bool, flagged: bool) -> None:
    executor = kit.FakeExecutor()
    submit, seen = executor.submit, []

    def watched(slab_index: int) -> None:
        header = executor._views[slab_index]["header"]
        seen.append(StepFlag(int(header[executor._header["flags"]])))
        submit(slab_index)

    executor.submit = watched
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, deterministic=asks)
    sizes = {"model": "fake", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig.from_flat({**sizes, "executor": "null", setting: True})
    async with AsyncEngine(config, executor=executor, tokenizer=kit.ByteTokenizer()) as engine:
        outputs = [output async for output in engine.generate("abc", params)]
    assert len(outputs[-1].outputs[0].token_ids) == 4
    assert len(seen) >= 4
    assert {bool(flags & StepFlag.FIXED_ORDER) for flags in seen} == {flagged}
