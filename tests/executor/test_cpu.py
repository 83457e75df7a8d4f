"""CpuExecutor on a tiny random model: steps in order, faults contained, clean end; and the engine over it."""

import asyncio
import select
import time

import numpy as np
import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.config import EngineConfig
from oneloop.errors import ConfigError, ModelError
from oneloop.executor.cpu import CpuExecutor
from oneloop.worker.inputs import SLAB_ALIGNMENT, aligned_buffer
from oneloop_core import Core, CoreConfig

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def settings(tiny_model):
    return {
        "model": str(tiny_model), "load_format": "dummy", "num_gpu_blocks_override": 64, "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }  # fmt: skip


@pytest.fixture
def started(settings):
    executor = CpuExecutor(EngineConfig.from_flat(settings))
    executor.locate()
    info = executor.start()
    yield executor, info
    executor.shutdown()


def make_core(info):
    return Core(
        CoreConfig(
            num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=8, max_num_batched_tokens=64,
            max_model_len=info.max_model_len, vocab_size=info.vocab_size,
        )
    )  # fmt: skip


def wait_for(executor, count):
    found = []
    while len(found) < count:
        assert select.select([executor.completion_fd()], [], [], 30)[0]
        found += executor.completions()
    return found


def test_model_info(started):
    _, info = started
    assert (info.vocab_size, info.max_model_len, info.num_blocks, info.block_size) == (260, 512, 64, 16)


def test_slabs_are_aligned_and_steps_complete_in_order(started):
    executor, info = started
    core = make_core(info)
    slabs = executor.attach(core.layout, 3, max_num_seqs=8)
    for slab in slabs:
        assert np.frombuffer(slab, np.uint8).ctypes.data % SLAB_ALIGNMENT == 0
        assert len(slab) == core.layout.num_bytes
    core.submit([1, 2, 3], temperature=0.0, max_tokens=9)
    tokens = []
    first, second = core.schedule(slabs[0]), core.schedule(slabs[1])
    executor.submit(0)
    executor.submit(1)
    done = wait_for(executor, 2)
    assert [(completion.slab_index, completion.error) for completion in done] == [(0, None), (1, None)]
    for step, slab in ((first, slabs[0]), (second, slabs[1])):
        tokens += [token for delta in core.commit(step, slab) for token in delta.token_ids]
    assert len(tokens) == 2


def test_a_fault_in_a_step_is_one_clean_line_and_the_next_step_runs(started, caplog):
    executor, info = started
    core = make_core(info)
    slabs = executor.attach(core.layout, 3, max_num_seqs=8)
    core.submit([1, 2, 3], temperature=0.0, max_tokens=9)
    step = core.schedule(slabs[0])
    tokens = next(field for field in core.layout.fields if field.name == "token_ids")
    np.frombuffer(slabs[0], np.int32, 3, tokens.offset)[:] = 10**9
    executor.submit(0)
    (completion,) = wait_for(executor, 1)
    assert completion.error == "the model's step failed (IndexError)"
    assert "Traceback" in caplog.text
    (delta,) = core.fail(step, completion.error)
    assert delta.finish_reason == "error"
    core.submit([1, 2, 3], temperature=0.0, max_tokens=9)
    core.schedule(slabs[1])
    executor.submit(1)
    assert wait_for(executor, 1)[0].error is None


def test_shutdown_is_idempotent_at_any_time(settings):
    executor = CpuExecutor(EngineConfig.from_flat(settings))
    executor.shutdown()
    executor.shutdown()


def test_settings_that_do_not_fit_are_named(settings, tiny_model):
    executor = CpuExecutor(EngineConfig.from_flat({**settings, "load_format": "gguf"}))
    with pytest.raises(ConfigError, match="load_format"):
        executor.locate()
    executor = CpuExecutor(EngineConfig.from_flat({**settings, "expert_statistics": True}))
    with pytest.raises(
        ConfigError, match=r"expert_statistics: .* has no experts to count for; leave it away"
    ):
        executor.locate()
    for change, message in [
        ({"max_model_len": 5000}, "max_model_len"),
        ({"kv_cache_memory_bytes": 10, "num_gpu_blocks_override": None}, "kv_cache_memory_bytes"),
    ]:
        executor = CpuExecutor(EngineConfig.from_flat({**settings, **change}))
        executor.locate()
        with pytest.raises(ConfigError, match=message):
            executor.start()
        executor.shutdown()
    executor = CpuExecutor(EngineConfig.from_flat({**settings, "load_format": "auto"}))
    with pytest.raises(ModelError, match="safetensors"):
        executor.locate()
    executor.shutdown()


def test_aligned_buffer_is_zeroed_and_writable():
    buffer = aligned_buffer(1000)
    assert (len(buffer), buffer.readonly, bytes(buffer)) == (1000, False, bytes(1000))


async def complete(engine, prompt, params=GREEDY):
    async for output in engine.generate(prompt, params):
        last = output
    return last.outputs


async def test_the_engine_over_it(settings):
    """Batched, chunked and with shared prefixes as alone."""
    prompts = [f"{'shared beginning ' * 3}{number % 4}" for number in range(12)]
    async with AsyncEngine.from_settings(**settings) as engine:
        alone = [await complete(engine, prompt) for prompt in prompts[:4]]
        together = await asyncio.gather(*(complete(engine, prompt) for prompt in prompts))
        forks = await complete(engine, "fork", SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True))
        stats = engine.stats()
    assert [outputs[0].token_ids for outputs in together] == [alone[i % 4][0].token_ids for i in range(12)]
    assert len({tuple(output.token_ids) for output in forks}) == 3
    assert stats.num_used_blocks == 0
    assert stats.num_prefix_hit_tokens > 0


async def test_rows_of_the_model_beyond_the_vocabulary_have_no_text(settings):
    """Models pad their output head; such ids can be sampled, and stand in lists of log-probabilities."""
    async with AsyncEngine.from_settings(**settings) as engine:
        beyond = len(engine.vocabulary)
        assert beyond < engine.model_info.vocab_size
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={beyond: 100}, logprobs=2)
        (output,) = await complete(engine, "a", params)
    assert (output.token_ids, output.text) == ([beyond] * 3, "")
    assert all(entries[beyond].decoded_token == "" for entries in output.logprobs)


async def test_the_loop_stays_free_during_a_long_step(settings):
    """The guards see no callback over 50 ms; here: timers fire on time while a prefill runs in the step thread."""
    settings["max_num_batched_tokens"] = 512
    async with AsyncEngine.from_settings(**settings) as engine:
        work = asyncio.gather(*(complete(engine, [7] * 400) for _ in range(2)))
        lags = []
        while not work.done():
            begin = time.monotonic()
            await asyncio.sleep(0.001)
            lags.append(time.monotonic() - begin)
        await work
    assert len(lags) > 5
