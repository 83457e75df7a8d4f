"""SmolLM2's greedy answers equal transformers' on the same GPU, however the engine schedules and launches them."""

from __future__ import annotations

import os

import pytest
import torch

from oneloop import LLM, SamplingParams
from oneloop.loader.embedded import embedded_path
from oneloop_bench.reference import transformers_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU, where `-m gpu` is asked for by hand, the same tests run on a few prompts."""
DTYPES = [torch.bfloat16, torch.float32] if DEVICE == "cuda" else [torch.float32]
NUM_PROMPTS = int(os.environ.get("ONELOOP_TEST_PROMPTS", 64 if DEVICE == "cuda" else 6))
EAGER_STRIDE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ROOMY = {"max_num_seqs": 32, "max_model_len": 4096, "num_gpu_blocks_override": 4096}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def judge(request, make_judge):
    path = embedded_path()
    assert path is not None, (
        "the embedded model is needed: run `make model`, or carry it (tools/device/README.md)"
    )
    return make_judge(transformers_llama(path, request.param))


@pytest.fixture
def prompts(golden_prompts):
    return sorted(golden_prompts, key=len)[:: max(1, 64 // NUM_PROMPTS)][-NUM_PROMPTS:]


@pytest.fixture
def start(judge, mode):
    """Factory: settings → an LLM in the judge's dtype and the mode's way of launching."""

    def make(**settings) -> LLM:
        dtype = str(judge.dtype).removeprefix("torch.")
        return LLM(
            "smollm2",
            device=DEVICE,
            dtype=dtype,
            enforce_eager=mode.enforce_eager,
            use_tqdm=False,
            **settings,
        )

    return make


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_alone_together_and_again(judge, start, prompts, mode):
    """One by one; all at once; and all at once with every prompt's blocks in the prefix cache.

    Launched kernel by kernel, a step alone takes as long as one of all, and has the kernels that a graph has: some do.
    """
    some = prompts[:: EAGER_STRIDE if mode.enforce_eager else 1]
    with start(**ROOMY) as llm:
        judge.check(some, [answers(llm, [ids])[0] for ids in some], what="alone")
        assert llm.reset_prefix_cache()
        judge.check(prompts, answers(llm, prompts), what="all at once")
        before = llm.stats().num_prefix_hit_tokens
        judge.check(prompts, answers(llm, prompts), what="with prefixes found")
        hits = llm.stats().num_prefix_hit_tokens - before
        assert hits >= sum((len(ids) - 1) // 16 * 16 for ids in prompts)


def test_chunked_prefill(judge, start, prompts):
    with start(**ROOMY, max_num_batched_tokens=64) as llm:
        judge.check(prompts, answers(llm, prompts), what="in chunks")


def test_starved_pool(judge, start, prompts):
    """Little more than the longest prompt: most sequences are preempted and computed anew."""
    blocks = (max(map(len, prompts)) + 24) // 16 + 8
    with start(max_model_len="auto", num_gpu_blocks_override=blocks, max_num_seqs=32) as llm:
        got = answers(llm, prompts)
        assert llm.stats().num_preemptions > 0 or len(prompts) < 64
    judge.check(prompts, got, what="preempted")
