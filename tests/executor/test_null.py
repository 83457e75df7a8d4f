"""NullExecutor: no torch, tokens by (seed, position) alone, steps in order after their time; and engines over it."""

import asyncio
import json
import select
import subprocess
import sys
import time

import numpy as np
import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.cli.main import make_parser
from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.executor.null import NullExecutor, random_tokens, tokens_of_text
from oneloop.start_times import StartTimes
from oneloop_core import Core, CoreConfig

SETTINGS = {"executor": "null", "max_num_seqs": 8, "max_num_batched_tokens": 64}


def make_config(**settings):
    return EngineConfig.from_flat({**SETTINGS, **settings})


async def texts(prompts, params, **settings):
    """What each prompt's sequences say, submitted together."""
    async with AsyncEngine(make_config(**settings)) as engine:

        async def one(prompt):
            async for output in engine.generate(prompt, params):
                last = output
            return [sequence.text for sequence in last.outputs]

        found = await asyncio.gather(*[one(prompt) for prompt in prompts])
        engine._loaded().core.audit()
        assert engine.stats().num_used_blocks == 0
        return found


def test_engine_and_http_come_up_without_torch():
    """From the command line's modules to a reply, torch is never imported."""
    code = """
import asyncio, sys
from oneloop.cli.main import make_parser
from oneloop.cli.arguments import engine_values
from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.engine.params import SamplingParams
import oneloop.api.server, oneloop.cli.serve

async def main():
    options = make_parser().parse_args(["serve", "--executor", "null", "--null-step-ms", "1"])
    async with AsyncEngine(EngineConfig.from_flat(engine_values(options))) as engine:
        assert engine.served_model_names == ("null",)
        async for output in engine.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True)):
            pass
        heavy = {"torch", "transformers", "triton"} & set(sys.modules)
        print(len(output.outputs[0].token_ids), heavy)

asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout.strip(), result.stderr) == ("5 set()", "")


def test_the_options_are_hidden_and_bounded(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--executor" not in shown
    assert "--null-step-ms" not in shown
    assert make_config(null_step_ms=20.0).worker.null_step_ms == 20.0
    for wrong in (-1.0, 21.0):
        with pytest.raises(ConfigError, match="null_step_ms"):
            make_config(null_step_ms=wrong)
    with pytest.raises(ConfigError, match=r"null_step_ms: .* add --executor null"):
        EngineConfig.from_flat({"null_step_ms": 5.0})


async def test_each_token_is_a_visible_character():
    ((text,),) = await texts(["x"], SamplingParams(max_tokens=400, ignore_eos=True))
    assert len(text) == 400
    assert text.isascii()
    assert text.isprintable()
    assert len(set(text)) > 60


@pytest.mark.parametrize(
    "other",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8, "mixed_step_tokens": 4},
        {"num_gpu_blocks_override": 12, "block_size": 4, "max_model_len": 40},  # sequences are preempted
        {"null_step_ms": 0.5},
    ],
)
async def test_output_does_not_depend_on_batching(other):
    prompts = [f"prompt {number}" for number in range(12)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = await texts(prompts, params)
    assert len({text for (text,) in expected}) == len(prompts)
    assert await texts(prompts, params, **other) == expected


async def test_output_depends_on_the_seed():
    async def of(n=1, engine_seed=0, seed=None):
        params = SamplingParams(max_tokens=24, ignore_eos=True, n=n, seed=seed)
        (found,) = await texts(["x"], params, seed=engine_seed)
        return found

    default = await of()
    assert await of() == default
    assert await of(engine_seed=1) != default
    assert await of(seed=5) == await of(seed=5, engine_seed=9)
    several = await of(n=4, seed=5)
    assert len(set(several)) == 4
    assert several[:1] == await of(seed=5)


def test_draws():
    seeds = np.arange(4000, dtype=np.uint64)
    positions = np.zeros(4000, np.int32)
    tokens = random_tokens(10, 14)(seeds, positions)
    assert np.bincount(tokens.astype(int), minlength=14)[10:].min() > 850
    assert set(tokens.tolist()) == {10, 11, 12, 13}
    draw = tokens_of_text([5, 6, 7])
    assert draw(np.array([0, 1, 2, 3], np.uint64), np.array([0, 0, 0, 4], np.int32)).tolist() == [5, 6, 7, 6]


async def test_logprobs_name_the_sampled_token_first():
    async with AsyncEngine(make_config()) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
        async for output in engine.generate("x", params):
            last = output
    (sequence,) = last.outputs
    assert sequence.logprobs is not None
    for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert token in entry
        assert len(entry) == 2


async def attached(**settings):
    """(executor, core, slabs) with a request of two sequences."""
    executor = NullExecutor(make_config(**settings), StartTimes())
    executor.locate()
    info = executor.start()
    core = Core(
        CoreConfig(
            num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=8, max_num_batched_tokens=64,
            max_model_len=info.max_model_len, vocab_size=info.vocab_size,
        )
    )  # fmt: skip
    slabs = executor.attach(core.layout, 3, max_num_seqs=8)
    core.submit([1, 2, 3], max_tokens=50)
    return executor, core, slabs


def is_readable(executor):
    return bool(select.select([executor.completion_fd()], [], [], 0)[0])


async def test_steps_are_told_one_by_one_in_order():
    executor, core, slabs = await attached()
    for index in range(2):
        assert core.schedule(slabs[index]) is not None
        executor.submit(index)
    told = []
    while is_readable(executor):
        (completion,) = executor.completions()
        told.append((completion.slab_index, completion.error))
    assert told == [(0, None), (1, None)]
    assert executor.completions() == []
    executor.shutdown()
    executor.shutdown()


async def test_steps_take_their_time_one_after_the_other():
    executor, core, slabs = await attached(null_step_ms=20.0)
    loop, ended = asyncio.get_running_loop(), []
    both = asyncio.Event()

    def told():
        ended.extend((completion.slab_index, loop.time()) for completion in executor.completions())
        if len(ended) == 2:
            both.set()

    loop.add_reader(executor.completion_fd(), told)
    begin, cpu = loop.time(), time.thread_time()
    for index in range(2):
        assert core.schedule(slabs[index]) is not None
        executor.submit(index)
    await asyncio.wait_for(both.wait(), 10)
    loop.remove_reader(executor.completion_fd())
    assert [index for index, _ in ended] == [0, 1]
    assert ended[0][1] - begin >= 0.0199
    assert ended[1][1] - begin >= 0.0399
    assert time.thread_time() - cpu < 0.01, "nobody waits busily"
    executor.shutdown()


async def test_shutdown_before_a_step_is_over():
    executor, core, slabs = await attached(null_step_ms=5.0)
    assert core.schedule(slabs[0]) is not None
    executor.submit(0)
    executor.shutdown()
    await asyncio.sleep(0.02)


async def test_a_model_gives_its_tokenizer_and_sizes(tiny_model):
    """Its weights are not needed: the folder has none."""
    config = make_config(model=str(tiny_model))
    async with AsyncEngine(config) as engine:
        assert (
            engine.model_info.vocab_size == json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        )
        assert engine.model_info.max_model_len == 512
        assert engine.tokenizer.chat_template is not None
        async for output in engine.generate("x", SamplingParams(max_tokens=8, ignore_eos=True)):
            last = output
        assert len(last.outputs[0].token_ids) == 8


async def test_sizes_of_the_pool():
    def sizes(**settings):
        executor = NullExecutor(make_config(**settings))
        executor.locate()
        info = executor.start()
        executor.shutdown()
        return info.num_blocks, info.block_size, info.max_model_len

    assert sizes() == (65_536, 16, 8192)
    assert sizes(num_gpu_blocks_override=10) == (10, 16, 160)
    assert sizes(max_model_len=131_072) == (65_536, 16, 131_072)
    with pytest.raises(ConfigError, match="max_model_len: 200 tokens do not fit the KV cache of 160"):
        sizes(num_gpu_blocks_override=10, max_model_len=200)


async def test_bytes_are_tokens_and_conversations_are_rendered():
    async with AsyncEngine(make_config()) as engine:
        text = "naïve 日本 <|im_end|>"
        ids = await engine.encode(text)
        assert ids[:-1] == list(text.removesuffix("<|im_end|>").encode())
        assert ids[-1] == engine.tokenizer.eos_token_ids[0] == 257
        assert await engine.decode(ids) == text
        rendered = await engine.render_chat([{"role": "user", "content": "hi"}])
        assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("num_allowed", [3, 60])
async def test_allowed_tokens_are_drawn_alike(num_allowed):
    """Whether few or many are: each about as often as any other."""
    config = EngineConfig.from_flat({**SETTINGS, "max_num_seqs": 8})
    allowed = list(range(20, 20 + 3 * num_allowed, 3))
    params = SamplingParams(
        max_tokens=4000, ignore_eos=True, detokenize=False, allowed_token_ids=allowed, n=2, seed=1
    )
    async with AsyncEngine(config, executor=NullExecutor(config, draw=random_tokens(0, 256))) as engine:
        async for output in engine.generate("a", params):
            last = output
    found = [token for sequence in last.outputs for token in sequence.token_ids]
    counts = np.bincount(found, minlength=256)
    assert counts.sum() == counts[allowed].sum() == 8000
    expected = 8000 / num_allowed
    assert np.abs(counts[allowed] - expected).max() < 6 * expected**0.5
