"""The deterministic mode: two thousand requests of every kind in random mixes, each as it is alone, bit by bit.

Chunked prompts, found prefixes, preemption, sampling, penalties, log-probabilities of tokens and prompts, in bfloat16.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from oneloop import AsyncEngine, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

VOCAB = 250
"""Tokens of prompts."""
LONGEST_PROMPT = 900
MAX_TOKENS = 120
SHORT_PROMPT = 30
CROWD = 100
NUM_BLOCKS = 160
"""Of 16 tokens: two of the longest requests, and a third of what a crowd of the short ones grows to."""
NUM_SEQS = 64
SETTINGS = {
    "device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": NUM_SEQS, "block_size": 16,
    "num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 512, "max_model_len": LONGEST_PROMPT + MAX_TOKENS,
}  # fmt: skip
ON_HOPPER = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 3,
    "moe_intermediate_size": 192, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MODELS = {
    "on Hopper": ON_HOPPER,
    "anywhere": {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 384},
    "experts": ON_HOPPER | EXPERTS,
    "fp8 experts": ON_HOPPER | EXPERTS,
    "fp8-block experts": ON_HOPPER | EXPERTS,
    "fp8": ON_HOPPER,
    "fp8-block": ON_HOPPER,
    "4 bits": ON_HOPPER | {"quantization_config": GPTQ},
    "8-bit keys": ON_HOPPER,
    "experts of 4 bits": ON_HOPPER | EXPERTS | {"quantization_config": GPTQ},
}
"""What the model differs in. Heads of 128 take the kernels of Hopper, others those of any card."""
KINDS = {
    "fp8": {"quantization": "fp8"}, "fp8-block": {"quantization": "fp8-block"}, "8-bit keys": {"kv_cache_dtype": "fp8"},
    "fp8 experts": {"quantization": "fp8"}, "fp8-block experts": {"quantization": "fp8-block"},
}  # fmt: skip
"""Settings beside those of all."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: list[int]
    params: SamplingParams


@pytest.fixture
def model(request, tiny_model: Path, tmp_path: Path) -> str:
    """A folder with a small Qwen 3, whose heads are normed; weights are random. request.param: of MODELS."""
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 1024, "num_hidden_layers": 3,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config |= MODELS[request.param]
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "model")


def random_requests(rng: random.Random, count: int, *, deterministic: bool = False) -> list[Asked]:
    """Two of five prompts begin with one of a few long prefixes; many of the others are short, with long answers."""
    prefixes = [ids(rng, rng.randint(20, LONGEST_PROMPT - 100)) for _ in range(6)]
    asked = []
    for number in range(count):
        prefix = rng.choice(prefixes) if number % 5 < 2 else []
        most = LONGEST_PROMPT - len(prefix)
        prompt = prefix + ids(
            rng, min(most, rng.choice((rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 300), most)))
        )
        asked.append(Asked(prompt, random_params(rng, deterministic, is_long=len(prompt) < SHORT_PROMPT)))
    return asked


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def random_params(rng: random.Random, deterministic: bool, *, is_long: bool = False) -> SamplingParams:
    """is_long: the answer is, so that contexts outgrow the pool."""
    fields: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.5:
        fields = {"temperature": rng.choice((0.7, 1.0)), "seed": rng.getrandbits(31)}
        fields |= rng.choice(
            ({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.01}, {"top_p": 0.9, "top_k": 50})
        )
    if rng.random() < 0.25:
        fields |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    if rng.random() < 0.2:
        fields |= {"logit_bias": {rng.randrange(VOCAB): 1.5, rng.randrange(VOCAB): -2.0}}
    if rng.random() < 0.4:
        fields |= {"logprobs": rng.randint(0, 5)}
    if rng.random() < 0.03:
        fields |= {"prompt_logprobs": rng.randint(0, 3)}
    n = 2 if rng.random() < 0.1 else 1
    max_tokens = rng.randint(MAX_TOKENS // 2, MAX_TOKENS) if is_long else rng.randint(1, 16)
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, deterministic=deterministic, **fields)


async def make_engine(model: str, **settings: Any) -> AsyncEngine:
    """In a thread: it imports what reads files."""
    return await asyncio.to_thread(AsyncEngine.from_settings, model, **SETTINGS, **settings)


async def answer(engine: AsyncEngine, asked: Asked) -> tuple[Any, ...]:
    """All that is told of a request, numbers as they are."""
    prompt = {"prompt_token_ids": asked.prompt}
    async with await engine.submit(prompt, asked.params, final_only=True) as stream:
        builder = engine.output_builder(stream)
        async for deltas in stream:
            builder.add(deltas)
        builder.add_told_once(stream)
        whole = builder.snapshot(0)
    told = [(one.token_ids, one.logprobs, one.finish_reason) for one in whole.outputs]
    return told, whole.prompt_logprobs


async def alone(engine: AsyncEngine, asked: Asked) -> tuple[Any, ...]:
    """When nothing else runs and nothing is cached."""
    while engine.stats().num_steps_in_flight or engine.stats().num_running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.reset_prefix_cache()
    return await answer(engine, asked)


async def together(engine: AsyncEngine, requests: list[Asked], rng: random.Random) -> list[tuple[Any, ...]]:
    """In random order, in waves: sometimes a few at once, sometimes many more than may run.

    First many with short prompts and long answers: they are let in together, and outgrow the pool.
    """
    answers: dict[int, tuple[Any, ...]] = {}
    places = list(range(len(requests)))
    rng.shuffle(places)
    crowd = [place for place in places if len(requests[place].prompt) < SHORT_PROMPT][:CROWD]

    async def one(place: int) -> None:
        answers[place] = await answer(engine, requests[place])

    wave, places = crowd, [place for place in places if place not in set(crowd)]
    while wave:
        async with asyncio.TaskGroup() as group:
            for place in wave:
                group.create_task(one(place))
                if wave is not crowd and rng.random() < 0.1:
                    await asyncio.sleep(rng.uniform(0, 0.002))
        size = rng.choice((3, 30, 200))
        wave, places = places[:size], places[size:]
    return [answers[place] for place in range(len(requests))]


def check(requests: list[Asked], lone: list[Any], mixed: list[Any]) -> None:
    """AssertionError telling of the first request that is unlike itself."""
    unlike = [place for place, (a, b) in enumerate(zip(lone, mixed, strict=True)) if a != b]
    if unlike:
        place = unlike[0]
        raise AssertionError(
            f"{len(unlike)} of {len(requests)} requests unlike alone; number {place}, a prompt of "
            f"{len(requests[place].prompt)} tokens, {requests[place].params}:\n{lone[place]}\n{mixed[place]}"
        )


def check_mix(engine: AsyncEngine) -> None:
    """It was a mix."""
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hit_tokens > 0
    assert stats.num_errored == 0


@pytest.mark.parametrize(
    ("model", "kind", "count"),
    [(name, name, 2000 if name == "on Hopper" else 300) for name in MODELS],
    ids=MODELS,
    indirect=["model"],
)
async def test_a_request_gets_the_same_tokens_alone_and_in_any_mix(model, kind, count):
    rng = random.Random(5)
    requests = random_requests(rng, count)
    engine = await make_engine(model, deterministic=True, **KINDS.get(kind, {}))
    async with engine:
        mixed = await together(engine, requests, rng)
        check_mix(engine)
        lone = [await alone(engine, asked) for asked in requests]
    check(requests, lone, mixed)


@pytest.mark.parametrize("model", ["on Hopper"], indirect=True)
async def test_requests_that_ask_for_it_beside_others_that_do_not(model):
    """What the default kernels have cached is not found by those that ask, nor the other way round."""
    rng = random.Random(6)
    requests = random_requests(rng, 200, deterministic=True)
    others = [Asked(asked.prompt, random_params(rng, False)) for asked in random_requests(rng, 100)]
    others += [Asked(asked.prompt, random_params(rng, False)) for asked in requests[:100]]
    everything = requests + others
    engine = await make_engine(model, deterministic_requests=True)
    async with engine:
        mixed = (await together(engine, everything, rng))[: len(requests)]
        check_mix(engine)
        lone = [await alone(engine, asked) for asked in requests]
    check(requests, lone, mixed)
