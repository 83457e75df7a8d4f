"""Thousands of requests of every kind over a pool that is far too small: each greedy answer is the one it gets alone.

Lengths, shared prefixes, several sequences, clients that leave, sampling beside greedy; the core's books are audited
all the while. A small run of the same on the CPU is part of CI.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from oneloop import AsyncEngine, SamplingParams
from oneloop.loader.embedded import embedded_path
from oneloop.start_times import StartTimes

if TYPE_CHECKING:
    from oneloop.engine.outputs import FinishReason

AUDIT_INTERVAL_S = 0.01
MAX_OTHERS = {torch.float32: 0.001, torch.float16: 0.15, torch.bfloat16: 1.0}
"""Per answer that equals the one given alone, those that a tie sent another way: other rows in a step make other sums.

In float32 two tokens tie once in some 300,000. In the short types each token ties with the share of
`conftest.MAX_TIES`, an answer has 32 on average, and what follows a tie is another text: up to 0.15 and 1 to one. Every
token of those is judged too, and beside the one tie that sent them off they have no more ties than others."""
SPAWNED_AT_ONCE = 200
"""Tasks begun in one turn of the loop, which the guards watch."""


@dataclass(frozen=True)
class Scale:
    """How much of it."""

    num_requests: int
    num_prompts: int
    max_num_seqs: int
    num_blocks: int
    longest_prompt: int
    max_tokens: int
    block_size: int


SMALL = Scale(
    100, num_prompts=12, max_num_seqs=8, num_blocks=80, longest_prompt=60, max_tokens=24, block_size=4
)
LARGE = Scale(
    10_000,
    num_prompts=100,
    max_num_seqs=256,
    num_blocks=400,  # with answers this long, dozens of preemptions among 10,000 requests
    longest_prompt=400,
    max_tokens=128,
    block_size=16,
)


@dataclass
class Answer:
    """What came of one request."""

    prompt: int
    greedy: bool
    max_tokens: int
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reason: FinishReason | None = None


def make_prompts(scale: Scale, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Random ids; two of three begin with one of a few long prefixes."""
    prefixes = [ids(rng, rng.randint(20, scale.longest_prompt - 20), vocab_size) for _ in range(5)]
    prompts = []
    for number in range(scale.num_prompts):
        prefix = rng.choice(prefixes) if number % 3 else []
        room = scale.longest_prompt - len(prefix)
        prompts.append(prefix + ids(rng, rng.randint(1, room), vocab_size))
    return prompts


def ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(3, min(vocab_size, 250)) for _ in range(count)]


async def ask(
    engine: AsyncEngine, prompt: list[int], answer: Answer, scale: Scale, rng: random.Random
) -> None:
    """One request of a random kind; some leave early."""
    kind = rng.choices(["plain", "several", "sampled", "leaves"], [60, 12, 12, 16])[0]
    answer.greedy = kind != "sampled"
    answer.max_tokens = rng.randint(1, scale.max_tokens)
    params = SamplingParams(
        temperature=0.0 if answer.greedy else 0.9,
        top_p=1.0 if answer.greedy else 0.8,
        seed=None if answer.greedy else rng.getrandbits(31),
        n=rng.randint(2, 3) if kind == "several" else 1,
        max_tokens=answer.max_tokens,
        ignore_eos=True,
    )
    leaves_after = rng.randint(0, 4) if kind == "leaves" else None
    async with await engine.submit(prompt, params) as stream:
        num_chunks = 0
        if leaves_after == 0:
            await asyncio.sleep(rng.uniform(0, 0.02))
            return
        async for deltas in stream:
            for delta in deltas:
                answer.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            num_chunks += 1
            if num_chunks == leaves_after:
                return
    answer.reason = stream.finish_reason


async def audit(engine: AsyncEngine) -> None:
    while True:
        engine._loaded().core.audit()
        await asyncio.sleep(AUDIT_INTERVAL_S)


async def alone(engine: AsyncEngine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Each prompt's answer when nothing else runs and nothing is cached."""
    golden = []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in prompts:
        await settled(engine)  # the step ahead still holds the last one's blocks
        assert engine.reset_prefix_cache()
        async with await engine.submit(prompt, params) as stream:
            (delta,) = await stream.all_deltas()
        golden.append(delta.token_ids)
    return golden


async def mixed(
    engine: AsyncEngine, prompts: list[list[int]], scale: Scale, rng: random.Random
) -> list[Answer]:
    """All requests, three times as many at once as may run."""
    room = asyncio.Semaphore(3 * scale.max_num_seqs)
    answers = []

    async def one(answer: Answer) -> None:
        async with room:
            await ask(engine, prompts[answer.prompt], answer, scale, rng)

    async with asyncio.TaskGroup() as group:
        for number in range(scale.num_requests):
            if number % SPAWNED_AT_ONCE == 0:
                await asyncio.sleep(0)
            answer = Answer(rng.randrange(len(prompts)), True, 0)
            answers.append(answer)
            group.create_task(one(answer))
    return answers


def check_books(engine: AsyncEngine) -> None:
    """Nothing is left over."""
    engine._loaded().core.audit()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    ended = stats.num_finished_stop + stats.num_finished_length + stats.num_aborted + stats.num_errored
    assert ended == stats.num_submitted
    assert stats.num_errored == 0
    assert stats.num_aborted > 0
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0


async def run(model: str, scale: Scale, judge, **settings) -> None:
    rng = random.Random(11)
    times = StartTimes()
    engine = AsyncEngine.from_settings(
        model,
        max_num_seqs=scale.max_num_seqs,
        num_gpu_blocks_override=scale.num_blocks,
        block_size=scale.block_size,
        max_model_len=scale.longest_prompt + scale.max_tokens,
        **settings,
    )
    async with engine:
        prompts = make_prompts(scale, engine.model_info.vocab_size, rng)
        with times.part("alone"):
            golden = await alone(engine, prompts, scale.max_tokens)
        with times.part("judging those"):
            await asyncio.to_thread(judge.check, prompts, golden, what="alone")
        auditor = asyncio.create_task(audit(engine))
        with times.part("mixed"):
            answers = await mixed(engine, prompts, scale, rng)
        assert not auditor.done(), auditor.exception()
        auditor.cancel()
        await settled(engine)
        check_books(engine)
    with times.part("judging the others"):
        await asyncio.to_thread(check_answers, prompts, golden, answers, judge)
    print(f"seconds: {times}")


async def settled(engine: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        while engine.stats().num_steps_in_flight or engine.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def check_answers(prompts: list[list[int]], golden: list[list[int]], answers: list[Answer], judge) -> None:
    """Greedy answers equal those given alone; others must be as good in the judge's eyes, which means a tie."""
    asked, others, num_equal = [], [], 0
    for answer in answers:
        if answer.reason is not None:
            assert answer.reason == "length"
            assert all(len(tokens) == answer.max_tokens for tokens in answer.token_ids.values())
        if not answer.greedy:
            continue
        for tokens in answer.token_ids.values():
            if tokens == golden[answer.prompt][: len(tokens)]:
                num_equal += 1
            else:
                asked.append(prompts[answer.prompt])
                others.append(tokens)
    print(f"{num_equal} greedy answers as alone, {len(others)} others")
    judge.check(asked, others, what="unlike alone", known_ties=len(others))
    assert len(others) <= MAX_OTHERS[judge.dtype] * num_equal, (
        f"{len(others)} greedy answers unlike the one given alone, {num_equal} like it, in {judge.dtype}"
    )


@pytest.fixture(params=[torch.float32], ids=str)
def tiny_judge(request, tiny_checkpoint, make_judge):
    """In float32, where hardly a tie hides anything, if nothing else is asked for."""
    from transformers import LlamaForCausalLM

    return make_judge(LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=request.param))


@pytest.fixture
def smollm2_judge(make_judge):
    from oneloop_bench.reference import transformers_llama

    path = embedded_path()
    assert path is not None, (
        "the embedded model is needed: run `make model`, or carry it (tools/device/README.md)"
    )
    return make_judge(transformers_llama(path, torch.bfloat16))


async def test_tiny_on_the_cpu(tiny_checkpoint, tiny_judge):
    await run(str(tiny_checkpoint), SMALL, tiny_judge, device="cpu", max_num_batched_tokens=64)


@pytest.mark.gpu
@pytest.mark.timeout(600)
async def test_tiny_on_the_gpu(tiny_checkpoint, tiny_judge, mode):
    settings = {"device": "cuda", "dtype": "float32", "enforce_eager": mode.enforce_eager}
    await run(str(tiny_checkpoint), LARGE, tiny_judge, **settings)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiny_judge", [torch.float16], indirect=True, ids=str)
async def test_tiny_in_half_precision(tiny_checkpoint, tiny_judge):
    """Its products are those of the short types' kernels."""
    await run(str(tiny_checkpoint), LARGE, tiny_judge, device="cuda", dtype="float16")


@pytest.mark.gpu
@pytest.mark.timeout(600)
async def test_smollm2_on_the_gpu(smollm2_judge):
    await run("smollm2", LARGE, smollm2_judge, device="cuda", dtype="bfloat16")
