"""Masks from the core through the loop to the executors: only allowed tokens, two steps in flight, calm neighbours."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import pytest

from oneloop import AsyncEngine, SamplingParams
from oneloop.config import EngineConfig
from oneloop.engine.constraints import TokenConstraints
from oneloop.errors import GenerationError, RequestError
from oneloop.executor.null import NullExecutor
from oneloop.worker.runner import ModelRunner
from oneloop_core import Grammar

NULL = {"executor": "null", "max_num_seqs": 8, "max_num_batched_tokens": 64}


def params(**settings):
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "detokenize": False, **settings})


def random_automaton(seed, num_states=12, vocab_size=95, first=32):
    """Moves of each state, by printable bytes; the last state is the end."""
    rng = random.Random(seed)
    states = [
        {
            rng.randrange(first, first + vocab_size): rng.randrange(num_states)
            for _ in range(rng.choice((1, 2, 40)))
        }
        for _ in range(num_states - 1)
    ]
    return [*states, {}]


def check_walk(states, tokens, finish_reason):
    """Every token is a move, and the sequence stops where there is none."""
    state = 0
    for place, token in enumerate(tokens):
        assert token in states[state], (place, token)
        state = states[state][token]
    assert (finish_reason == "stop") == (not states[state])


async def run(engine, prompt, sampling, constraints=None, **options):
    """(tokens, finish reason) of each of the request's sequences."""
    more = {} if constraints is None else {"constraints": constraints}
    stream = await engine.submit(prompt, sampling, **more, **options)
    async with stream:
        output = engine.output_builder(stream)
        async for deltas in stream:
            output.add(deltas)
    outputs = output.snapshot(stream.num_cached_tokens).outputs
    return [(list(one.token_ids), one.finish_reason) for one in outputs]


class Watched:
    """Notes what an executor is told."""

    def __init__(self, executor):
        self.calls = []
        self._executor = executor
        self._in_flight = 0

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, slab_index):
        self._in_flight += 1
        self.calls.append(("submit", slab_index, self._in_flight))
        self._executor.submit(slab_index)

    def sample(self, slab_index):
        self.calls.append(("sample", slab_index, self._in_flight))
        self._executor.sample(slab_index)

    def completions(self):
        ended = self._executor.completions()
        self._in_flight -= len(ended)
        return ended


def null_executor(**settings):
    return Watched(NullExecutor(EngineConfig.from_flat({**NULL, **settings})))


@pytest.fixture
def tiny(tiny_model):
    return {
        "model": str(tiny_model), "load_format": "dummy", "num_gpu_blocks_override": 64, "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }  # fmt: skip


async def grammars_together(engine, num_requests=24):
    """Random automata with n, long prompts and too few blocks; each sequence is walked through its own."""
    rng = random.Random(5)

    async def one(number):
        states = random_automaton(number)
        sampling = params(n=rng.choice((1, 1, 3)), seed=number, max_tokens=40)
        constraints = TokenConstraints(grammar=Grammar.from_automaton(states))
        prompt = [65 + number % 3] * rng.choice((3, 40, 90))
        for tokens, reason in await run(engine, prompt, sampling, constraints):
            check_walk(states, tokens, reason)

    await asyncio.gather(*map(one, range(num_requests)))


async def test_every_token_is_allowed_on_the_null_executor():
    settings = {**NULL, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 12}
    async with AsyncEngine.from_settings(**settings) as engine:
        await grammars_together(engine)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_used_blocks == 0


async def test_every_token_is_allowed_on_the_cpu_executor(tiny):
    async with AsyncEngine.from_settings(
        **{**tiny, "num_gpu_blocks_override": 14, "max_model_len": 200}
    ) as engine:
        await grammars_together(engine, 12)
        assert engine.stats().num_used_blocks == 0


async def test_two_steps_stay_in_flight_and_each_is_sampled_once():
    executor = null_executor(null_step_ms=2.0)
    settings = EngineConfig.from_flat({**NULL, "null_step_ms": 2.0})
    async with AsyncEngine(settings, executor=executor) as engine:
        states = [dict.fromkeys(range(32, 127), 0)]
        constraints = TokenConstraints(grammar=Grammar.from_automaton(states))
        await run(engine, "a", params(max_tokens=60), constraints)
    submits = [call for call in executor.calls if call[0] == "submit"]
    samples = [call for call in executor.calls if call[0] == "sample"]
    assert len(submits) == len(samples) == 60
    # All but the first were launched while the one before was in flight.
    assert [depth for _, _, depth in submits[1:]] == [2] * 59
    # In the order of their launches, and before the next one.
    order = [(kind, slab) for kind, slab, _ in executor.calls]
    launched = None
    for kind, slab in order:
        if kind == "submit":
            assert launched is None
            launched = slab
        else:
            assert slab == launched
            launched = None


async def test_plain_steps_hear_nothing_of_masks(monkeypatch):
    executor = null_executor()
    async with AsyncEngine(EngineConfig.from_flat(NULL), executor=executor) as engine:
        await asyncio.gather(*(run(engine, "abc", params(n=2, top_k=5)) for _ in range(5)))
        assert engine.metrics.loop.parts["mask"] == 0
    assert {kind for kind, _, _ in executor.calls} == {"submit"}


@pytest.mark.parametrize("name", ["null", "cpu"])
async def test_neighbours_of_masked_rows_get_the_tokens_they_get_alone(name, tiny):
    async with AsyncEngine.from_settings(**(NULL if name == "null" else tiny)) as engine:
        sampling = [params(seed=seed, temperature=seed / 3, logprobs=seed or None) for seed in range(4)]
        prompts = [[60 + seed] * (5 + seed) for seed in range(4)]
        alone = [await run(engine, *each) for each in zip(prompts, sampling, strict=True)]
        states = [{65 + i: 0 for i in range(20)}]
        constraints = TokenConstraints(grammar=Grammar.from_automaton(states))
        masked = [run(engine, [70], params(seed=9, max_tokens=20), constraints) for _ in range(4)]
        plain = [run(engine, *each) for each in zip(prompts, sampling, strict=True)]
        together = await asyncio.gather(*masked, *plain)
    assert together[4:] == alone
    assert all(65 <= token < 85 for found in together[:4] for token in found[0][0])


async def test_log_probabilities_are_the_model_s_own(tiny):
    """A mask changes what is drawn, not what the model thought of it."""
    async with AsyncEngine.from_settings(**tiny) as engine:

        async def first(sampling):
            async for output in engine.generate([1, 2, 3], sampling):
                last = output
            return last.outputs[0]

        plain = await first(SamplingParams(max_tokens=1, temperature=0, logprobs=20))
        best = plain.token_ids[0]
        others = [token for token in range(250) if token != best]
        masked = await first(
            SamplingParams(max_tokens=1, temperature=0, logprobs=20, allowed_token_ids=others)
        )
    assert masked.token_ids[0] == list(plain.logprobs[0])[1]
    assert masked.logprobs[0][best].rank == 1
    for token, entry in plain.logprobs[0].items():
        assert entry.logprob == pytest.approx(masked.logprobs[0][token].logprob)


@pytest.mark.parametrize("name", ["null", "cpu"])
async def test_allowed_tokens(name, tiny):
    async with AsyncEngine.from_settings(**(NULL if name == "null" else tiny)) as engine:
        ((tokens, reason),) = await run(
            engine, "a", params(allowed_token_ids=[70, 80], seed=1, max_tokens=40)
        )
    assert (set(tokens), reason) == ({70, 80}, "length")


async def test_bad_words_are_not_said():
    letters = list(b"abc ")
    async with AsyncEngine.from_settings(**NULL) as engine:
        said = b""
        for seed in range(20):
            sampling = params(allowed_token_ids=letters, bad_words=["ab", "c"], seed=seed, max_tokens=50)
            ((tokens, _),) = await run(engine, "a", sampling)
            assert b"ab" not in bytes(tokens)
            assert b" c" not in bytes(tokens)
            said += bytes(tokens)
        assert set(said) == set(b"ab "), "a word of one token is banned as it is"


async def test_a_budget_and_a_command_end_the_thinking():
    end = tuple(b"</t>")
    states = [{ord("{"): 1}, {ord("}"): 2}, {}]
    grammar = Grammar.from_automaton(states)
    async with AsyncEngine.from_settings(**{**NULL, "null_step_ms": 1.0}) as engine:
        limited = TokenConstraints(grammar=grammar, grammar_after=end, thinking_budget=5, thinking_end=end)
        ((tokens, reason),) = await run(engine, "a", params(max_tokens=50), limited)
        assert bytes(tokens[5:]) == b"</t>{}"
        assert reason == "stop"
        waiting = TokenConstraints(grammar=grammar, grammar_after=end)
        running = asyncio.create_task(run(engine, "a", params(max_tokens=5000), waiting, request_id="mine"))
        await asyncio.sleep(0.05)
        assert engine.end_thinking("mine", end)
        ((tokens, reason),) = await asyncio.wait_for(running, 10)
        assert bytes(tokens[-6:]) == b"</t>{}"
        assert reason == "stop"
        assert not engine.end_thinking("mine", end)
        with pytest.raises(RequestError, match="token_ids"):
            engine.end_thinking("mine", [10**6])


@pytest.mark.parametrize(("name", "turns"), [("null", 1000), ("cpu", 30)])
async def test_a_slot_keeps_nothing_of_the_mask_it_had(name, turns, tiny):
    """T18: a request that may say one token only, then an ordinary one in the same slot."""
    settings = {**(NULL if name == "null" else tiny), "max_num_seqs": 1}
    async with AsyncEngine.from_settings(**settings) as engine:
        sampling = params(seed=3, max_tokens=4)
        golden = await run(engine, "golden", sampling)
        for turn in range(turns):
            token = 33 + turn % 90
            narrow = params(allowed_token_ids=[token], max_tokens=2)
            assert await run(engine, "golden", narrow) == [([token] * 2, "length")]
            assert await run(engine, "golden", sampling) == golden


async def test_constraints_that_contradict_each_other_end_one_request_with_an_error():
    async with AsyncEngine.from_settings(**NULL) as engine:
        constraints = TokenConstraints(grammar=Grammar.from_automaton([{65: 1}, {}]))
        other = asyncio.create_task(run(engine, "b", params()))
        with pytest.raises(GenerationError, match="contradict"):
            await run(engine, "a", params(allowed_token_ids=[66]), constraints)
        assert (await other)[0][1] == "length"


async def test_a_step_that_fails_before_its_masks_came_fails_alone(tiny, monkeypatch):
    """Its release is not taken for the next one's."""
    original, numbers = ModelRunner.forward, count()

    def forward(runner, slab):
        if next(numbers) == 5:
            raise RuntimeError("broken")
        return original(runner, slab)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    constraints = TokenConstraints(grammar=Grammar.from_automaton([dict.fromkeys(range(65, 90), 0)]))
    async with AsyncEngine.from_settings(**tiny) as engine:
        with pytest.raises(GenerationError, match="RuntimeError"):
            await run(engine, "a", params(max_tokens=30), constraints)
        ((tokens, reason),) = await run(engine, "a", params(max_tokens=30), constraints)
    assert (len(tokens), reason) == (30, "length")
    assert all(65 <= token < 90 for token in tokens)


def test_a_grammar_by_table_is_checked():
    for states in ([], [{}], [{65: 1}], [{65: 0}, {66: 5}]):
        with pytest.raises(ValueError, match="state"):
            Grammar.from_automaton(states)
