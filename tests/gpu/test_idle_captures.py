"""Capturing graphs in idle moments holds the event loop for less than a client notices, whatever the model's kernels.

Runs with the card to itself: beside other processes the driver spins for as long as theirs run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from oneloop import AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.fixture
def small_model(tiny_model: Path, tmp_path: Path) -> Path:
    """SmolLM2's sizes, to be filled with dummy weights; the tokenizer is a tiny one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.held_at_most(0.1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_no_capture_holds_the_loop(
    small_model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oneloop.worker.gpu.runner.START_LIMIT_S", 0.0)
    engine = AsyncEngine.from_settings(
        str(small_model), device="cuda", dtype=dtype, load_format="dummy", max_model_len=2048,
        max_num_batched_tokens=1024, gpu_memory_utilization=0.3,
    )  # fmt: skip
    async with engine:
        prepared_s = engine.metrics.loop.parts
        before = -1.0
        while prepared_s["prepare"] > before:  # until it is over
            before = prepared_s["prepare"]
            await asyncio.sleep(0.5)
        assert before > 0.1  # there was much to capture
        stream = await engine.submit(
            {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=5, ignore_eos=True)
        )
        async with stream:
            assert sum([len(delta.token_ids) async for deltas in stream for delta in deltas]) == 5
