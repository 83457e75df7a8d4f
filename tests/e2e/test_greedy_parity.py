"""Greedy output of SmolLM2 equals transformers' generate, token for token, however the engine schedules it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oneloop import LLM, SamplingParams
from oneloop.loader.embedded import fetch_embedded

FLOAT_NOISE = 2e-3
"""Logit gap under which two tokens tie: float32 sums in another order differ by about 1e-4 on logits of size 20."""
MAX_TIES = 3
"""More ties than this among the 64 answers means an error that hides behind them."""

DATA = json.loads((Path(__file__).parent / "data" / "greedy.json").read_text())
ENTRIES = DATA["entries"]
# About a minute each on two quiet cores; the limit is for machines that are neither.
pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0.0, max_tokens=DATA["max_new_tokens"], ignore_eos=True)
ROOMY = {"kv_cache_memory_bytes": 512 << 20, "max_model_len": 4096}


def answers(llm: LLM, entries: list[dict]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": entry["prompt"]} for entry in entries]
    return [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY, use_tqdm=False)]


def assert_equal(entries: list[dict], got: list[list[int]]) -> None:
    """Token for token; a difference is allowed only where the reference's two best logits tie, and is printed."""
    ties = 0
    for number, (entry, output) in enumerate(zip(entries, got, strict=True)):
        assert len(output) == len(entry["output"])
        if output == entry["output"]:
            continue
        first = next(i for i, (a, b) in enumerate(zip(output, entry["output"], strict=True)) if a != b)
        gap = entry["gaps"][first]
        print(f"prompt {number} ({entry['kind']}): token {first} differs, logit gap {gap}")
        assert gap < FLOAT_NOISE, f"prompt {number} ({entry['kind']}), token {first}: gap {gap} is no tie"
        ties += 1
    assert ties <= MAX_TIES


def test_enough_and_varied_prompts() -> None:
    lengths = [len(entry["prompt"]) for entry in ENTRIES]
    assert len(ENTRIES) >= 64
    assert max(lengths) == 2000
    assert {entry["kind"] for entry in ENTRIES} == {"chat", "plain", "long"}


@pytest.fixture(scope="module")
def roomy() -> LLM:
    with LLM("smollm2", **ROOMY, max_num_seqs=32) as llm:
        yield llm


def test_alone(roomy: LLM) -> None:
    got = [answers(roomy, [entry])[0] for entry in ENTRIES]
    assert_equal(ENTRIES, got)


def test_prefix_hits(roomy: LLM) -> None:
    """Everything again on the same engine: now the prompts' blocks are found."""
    before = roomy.stats().num_prefix_hit_tokens
    assert_equal(ENTRIES, answers(roomy, ENTRIES))
    hits = roomy.stats().num_prefix_hit_tokens - before
    assert hits > 0.8 * sum(len(entry["prompt"]) for entry in ENTRIES)


def test_batch_of_32() -> None:
    with LLM("smollm2", **ROOMY, max_num_seqs=32, enable_prefix_caching=False) as llm:
        assert_equal(ENTRIES, answers(llm, ENTRIES))


def test_chunked_prefill() -> None:
    with LLM("smollm2", **ROOMY, max_num_seqs=32, max_num_batched_tokens=64) as llm:
        assert_equal(ENTRIES, answers(llm, ENTRIES))


def test_starved_pool() -> None:
    """A pool that holds little more than the longest prompt: most sequences are preempted and recomputed."""
    with LLM("smollm2", max_model_len=2304, num_gpu_blocks_override=150, max_num_seqs=32) as llm:
        got = answers(llm, ENTRIES)
        assert llm.stats().num_preemptions > 0
    assert_equal(ENTRIES, got)


def test_golden_is_what_transformers_says() -> None:
    """The recorded answers against a live run, on a few prompts of each kind."""
    from oneloop_bench.reference import transformers_llama

    model = transformers_llama(fetch_embedded())
    chosen = [entry for entry in ENTRIES if len(entry["prompt"]) < 400][::9]
    with torch.inference_mode():
        got = [
            model.generate(
                torch.tensor([entry["prompt"]]),
                attention_mask=torch.ones(1, len(entry["prompt"]), dtype=torch.long),
                max_new_tokens=DATA["max_new_tokens"],
                do_sample=False,
            )[0, len(entry["prompt"]) :].tolist()
            for entry in chosen
        ]
    assert_equal(chosen, got)
