"""Requests from prompt to text: right in every way of running, with two steps in flight."""

import asyncio
import itertools

import pytest

from oneloop import SamplingParams
from oneloop.errors import RequestError
from oneloop.tokenize.bytes import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=12)


async def complete(engine, prompt, params=GREEDY, **more):
    last = None
    async for output in engine.generate(prompt, params, **more):
        last = output
    return last


async def test_text_tokens_and_reason(kit):
    async with kit.running_engine() as engine:
        output = await complete(engine, "the sea is", request_id="mine")
    text = kit.greedy_text("the sea is", 12)
    assert (output.request_id, output.prompt, output.finished) == ("mine", "the sea is", True)
    assert output.prompt_token_ids == list(b"the sea is")
    (sequence,) = output.outputs
    assert (sequence.text, sequence.token_ids, sequence.finish_reason) == (
        text,
        list(text.encode()),
        "length",
    )
    assert sequence.finished()


async def test_outputs_grow_and_old_ones_stay(kit):
    async with kit.running_engine() as engine:
        outputs = [output async for output in engine.generate("abc", GREEDY)]
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == kit.greedy_text("abc", 12)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) > 3
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize(
    "prompt", [{"prompt": "hello"}, {"prompt_token_ids": list(b"hello")}, list(b"hello"), tuple(b"hello")]
)
async def test_kinds_of_prompt(kit, prompt):
    async with kit.running_engine() as engine:
        output = await complete(engine, prompt)
    assert output.outputs[0].text == kit.greedy_text("hello", 12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 8},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"scheduling_policy": "priority"},
    ],
    ids=["roomy", "chunked", "two-rows", "no-prefix-cache", "priority"],
)
async def test_many_at_once_equal_each_alone(kit, settings):
    """Shared prefixes, chunked prefill, waiting: the text never changes."""
    prompts = [f"a shared beginning {'x' * (number % 7)} {number % 5}" for number in range(24)]
    async with kit.running_engine(**settings) as engine:
        outputs = await asyncio.gather(*(complete(engine, prompt) for prompt in prompts))
    assert [output.outputs[0].text for output in outputs] == [
        kit.greedy_text(prompt, 12) for prompt in prompts
    ]


async def test_a_starved_pool_preempts_and_gives_the_same_text(kit):
    executor = kit.FakeExecutor(num_blocks=12, max_model_len=48)
    prompts = [f"{number} grows" for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=30)
    async with kit.running_engine(executor) as engine:
        outputs = await asyncio.gather(*(complete(engine, prompt, params) for prompt in prompts))
        assert engine.stats().num_preemptions > 0
    assert [output.outputs[0].text for output in outputs] == [
        kit.greedy_text(prompt, 30) for prompt in prompts
    ]


async def test_two_steps_are_in_flight(kit):
    executor = kit.FakeExecutor(delay_s=0.002)
    async with kit.running_engine(executor) as engine:
        await complete(engine, "overlap")
    assert executor.max_waiting == 2


async def test_n_sequences(kit):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10)
    async with kit.running_null_engine() as engine:
        first, again = await asyncio.gather(
            complete(engine, "fork me", params), complete(engine, "fork me", params)
        )
    assert [sequence.index for sequence in first.outputs] == [0, 1, 2]
    assert all(len(sequence.token_ids) == 10 for sequence in first.outputs)
    assert len({sequence.text for sequence in first.outputs}) > 1
    assert [s.text for s in first.outputs] == [s.text for s in again.outputs]


async def test_stops(kit):
    text = kit.greedy_text("stop here", 12)
    async with kit.running_engine() as engine:
        cut = await complete(
            engine, "stop here", SamplingParams(temperature=0, max_tokens=12, stop=text[4:6])
        )
        by_id = await complete(
            engine, "stop here", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[ord(text[3])])
        )
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == (text[: text.index(text[4:6])], "stop")
    assert cut.outputs[0].stop_reason == text[4:6]
    assert by_id.outputs[0].stop_reason == ord(text[3])


async def test_the_end_token_ends(kit):
    executor = kit.FakeExecutor(choose=lambda history, seed, index: kit.EOS if index == 3 else 120)
    async with kit.running_engine(executor) as engine:
        ended = await complete(engine, "ab")
        ignored = await complete(engine, "ab", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("xxx", "stop")
    assert ended.outputs[0].stop_reason is None
    assert (len(ignored.outputs[0].token_ids), ignored.outputs[0].finish_reason) == (12, "length")


async def test_logprobs_have_the_sampled_and_the_top(kit):
    async with kit.running_null_engine() as engine:
        output = await complete(engine, "log", SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    (sequence,) = output.outputs
    assert len(sequence.logprobs) == 3
    assert sequence.cumulative_logprob == pytest.approx(-1.5)
    for token_id, entry in zip(sequence.token_ids, sequence.logprobs, strict=True):
        assert set(entry) == {token_id, token_id - 1}
        assert (entry[token_id].rank, entry[token_id].decoded_token) == (1, chr(token_id))


async def test_lower_priority_values_go_first(kit):
    order = []

    async def read(stream):
        async for _ in stream:
            pass
        order.append(stream.request_id)

    async with kit.running_null_engine(step_ms=5, max_num_seqs=1, scheduling_policy="priority") as engine:
        streams = [await engine.submit("x", GREEDY, request_id="first")]
        await asyncio.sleep(0.01)  # the loop launches it
        for name, priority in [("low", 5), ("middle", 0), ("high", -5)]:
            streams.append(await engine.submit("x", GREEDY, request_id=name, priority=priority))
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.gather(*readers)
    assert order == ["first", "high", "middle", "low"]


async def test_the_prefix_cache_is_used_and_reported(kit):
    async with kit.running_engine() as engine:
        prompt = "a prefix of some length, twice"
        first = await complete(engine, prompt)
        second = await complete(engine, prompt)
        salted = await complete(engine, prompt, cache_salt="other")
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= len(prompt) - 4
    assert salted.num_cached_tokens == 0
    assert first.outputs[0].text == second.outputs[0].text == salted.outputs[0].text


async def test_the_loop_makes_a_fixed_number_of_core_calls_per_step(kit):
    """Whatever the batch: one schedule and one commit a step (plus schedules that find nothing)."""
    calls = {"schedule": 0, "commit": 0}

    class CountingCore:
        def __init__(self, core):
            self._core = core

        def __getattr__(self, name):
            if name in calls:
                calls[name] += 1
            return getattr(self._core, name)

    async with kit.running_null_engine() as engine:
        engine._step_loop._core = CountingCore(engine._step_loop._core)
        await asyncio.gather(*(complete(engine, f"prompt {number}") for number in range(8)))
        await kit.settled(engine)
        num_steps = engine.stats().num_steps
    assert calls["commit"] == num_steps
    assert calls["schedule"] <= 3 * num_steps + 16


async def test_intake_refuses_before_anything_is_queued(kit):
    async with kit.running_null_engine() as engine:
        for prompt, field, message in [
            ("", "prompt", "empty"),
            ([], "prompt", "empty"),
            ({"prompt_token_ids": []}, "prompt", "empty"),
            ([1, 2, VOCAB_SIZE], "prompt", str(VOCAB_SIZE)),
            ([-1], "prompt", "-1"),
            ([1, "2"], "prompt", "integers"),
            ([2**70], "prompt", "more than 64 bits"),
            ("x" * 512, "prompt", "512 tokens"),
            (list(range(10)) * 10_000, "prompt", "512 tokens"),
            ("\ud800", "prompt", "surrogate"),
            (None, "prompt", "a prompt is"),
            (5, "prompt", "a prompt is"),
            ({"text": "x"}, "prompt", "a prompt is"),
        ]:
            with pytest.raises(RequestError, match=message) as caught:
                await engine.submit(prompt, GREEDY)
            assert caught.value.field == field
        with pytest.raises(RequestError, match="--scheduling-policy priority"):
            await engine.submit("x", GREEDY, priority=1)
        with pytest.raises(RequestError, match="cache_salt"):
            await engine.submit("x", GREEDY, cache_salt="s" * 129)
        with pytest.raises(RequestError, match="n must be in 1 … 8"):
            await engine.submit("x", SamplingParams(n=9))
        assert engine.stats().num_submitted == 0
        assert engine.metrics.rejected["invalid"] == 16


async def test_the_context_is_filled_to_the_last_token(kit):
    async with kit.running_null_engine() as engine:
        full = await complete(engine, "y" * 500, SamplingParams(temperature=0, max_tokens=None))
        cut = await complete(engine, "y" * 511, None)
        with pytest.raises(RequestError, match="has 500 and max_tokens asks for 13 more") as caught:
            await complete(engine, "y" * 500, SamplingParams(max_tokens=13))
        assert caught.value.field == "max_tokens"
        with pytest.raises(RequestError, match="min_tokens") as caught:
            await complete(engine, "y" * 500, SamplingParams(max_tokens=None, min_tokens=13))
    assert (len(full.outputs[0].token_ids), full.outputs[0].finish_reason) == (12, "length")
    assert len(cut.outputs[0].token_ids) == 1


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(temperature=0)])
async def test_who_says_nothing_of_it_gets_16_tokens(kit, params):
    async with kit.running_null_engine() as engine:
        output = await complete(engine, "a", params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (16, "length")


async def test_the_empty_text_is_no_prompt_even_where_there_is_a_begin_token(kit):
    async with kit.running_engine() as engine:
        engine.tokenizer.bos_token_id = kit.BOS
        engine.tokenizer.encode_batch = lambda texts, **_: [[kit.BOS]] * len(texts)
        with pytest.raises(RequestError, match="empty"):
            await complete(engine, "")
