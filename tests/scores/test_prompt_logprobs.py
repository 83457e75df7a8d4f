"""Log-probabilities of prompts equal transformers', however the engine schedules them."""

from __future__ import annotations

import random

import pytest

from oneloop import SamplingParams
from oneloop.engine.params import MAX_PROMPT_ENTRIES
from oneloop.errors import RequestError

TOLERANCE = 1e-3


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def check(twin, output, num_top: int) -> None:
    """Every entry against the whole vocabulary of transformers' log-probabilities."""
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    expected = twin.logprobs(prompt) if len(prompt) > 1 else None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        row = expected[position - 1]
        own = entry[prompt[position]]
        assert own.logprob == pytest.approx(row[prompt[position]].item(), abs=TOLERANCE)
        assert abs(int((row > row[prompt[position]]).sum()) + 1 - own.rank) <= 1  # a tie may go either way
        tops = sorted((found for found in entry.values() if found.rank <= num_top), key=lambda top: top.rank)
        assert [top.rank for top in tops] == list(range(1, num_top + 1))
        best = row.topk(num_top).values.tolist() if num_top else []
        assert [top.logprob for top in tops] == pytest.approx(best, abs=TOLERANCE)
        for token, found in entry.items():
            assert found.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)


def score(llm, prompts, num_top=3, **changes):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 0, "prompt_logprobs": num_top, **changes})
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_cold(twin, make_llm, num_top):
    with make_llm() as llm:
        for length in (1, 2, 15, 16, 17, 100):
            (output,) = score(llm, [prompt_of(length)], num_top)
            check(twin, output, num_top)
            assert output.outputs[0].token_ids == []
            assert output.outputs[0].finish_reason == "length"


def test_prefix_hits_are_not_used_for_the_prompt_and_blocks_are_cached_for_others(twin, make_llm):
    prompt = prompt_of(100)
    with make_llm() as llm:
        (first,) = score(llm, [prompt])
        (plain,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=4))
        assert plain.num_cached_tokens == 96
        (again,) = score(llm, [prompt])
        assert again.num_cached_tokens == 0
        (longer,) = score(llm, [[*prompt, *prompt_of(20, 1)]], max_tokens=4)
        for output in (first, again, longer):
            check(twin, output, 3)
        assert len(longer.outputs[0].token_ids) == 4


def test_chunked_and_batched_with_answers(twin, make_llm):
    """Prompts that are scored and prompts that are not, in steps of 24 tokens, with answers and without."""
    prompts = [prompt_of(length, length) for length in (5, 90, 33, 64, 7, 120, 16)]
    with make_llm(max_num_batched_tokens=24, max_num_seqs=4) as llm:
        jobs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=3 * (number % 3) if number % 2 else 5,
                ignore_eos=True,
                logprobs=2 if number % 2 else None,
                prompt_logprobs=number if number % 2 else None,
            )
            for number in range(len(prompts))
        ]
        outputs = llm.generate(jobs, params)
    for number, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) == params[number].max_tokens
        if number % 2:
            check(twin, output, number)
        else:
            assert output.prompt_logprobs is None


def test_under_preemption(twin, make_llm):
    """A pool for one long prompt and a half: what was scored before a preemption is not asked for again."""
    with make_llm(
        num_gpu_blocks_override=26, max_model_len=400, max_num_batched_tokens=32, max_num_seqs=8
    ) as llm:
        prompts = [prompt_of(100, seed) for seed in range(8)]
        outputs = score(llm, prompts, 2, max_tokens=80, ignore_eos=True)
        assert llm.stats().num_preemptions > 0
    for output in outputs:
        check(twin, output, 2)
        assert len(output.outputs[0].token_ids) == 80


def test_several_answers_share_one_prompt(twin, make_llm):
    with make_llm() as llm:
        (output,) = score(
            llm, [prompt_of(40)], 1, n=3, max_tokens=5, temperature=1.0, seed=1, ignore_eos=True
        )
    check(twin, output, 1)
    assert [len(answer.token_ids) for answer in output.outputs] == [5, 5, 5]


def test_the_whole_context(twin, make_llm):
    """L tokens with none to follow are scored; one more is refused, and so is L with an answer."""
    with make_llm() as llm:
        context = llm.model_info.max_model_len
        (output,) = score(llm, [prompt_of(context)], 1)
        check(twin, output, 1)
        with pytest.raises(RequestError, match=rf"{context} tokens, and the prompt has {context + 1}"):
            score(llm, [prompt_of(context + 1)])
        with pytest.raises(RequestError, match="no room for an answer"):
            score(llm, [prompt_of(context)], max_tokens=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_logprobs": -1}, "-1 .the whole vocabulary. is more than is served: at most 20"),
        ({"prompt_logprobs": 21}, "0 … 20"),
        ({"prompt_logprobs": None}, "max_tokens must be in 1"),
        ({"n": 2}, "n must be 1 where max_tokens is 0"),
    ],
)
def test_what_is_refused(make_llm, changes, message):
    with make_llm() as llm, pytest.raises(RequestError, match=message):
        score(llm, [prompt_of(4)], **changes)


def test_a_prompt_has_so_many_at_most(make_llm):
    params = SamplingParams(prompt_logprobs=20, max_tokens=0)
    with make_llm() as llm:
        resolved = params.resolve(llm._thread.engine.default_sampling, vocab_size=260, max_sequences=1)
    length = MAX_PROMPT_ENTRIES // 21
    assert resolved.behind(length, 1 << 20) is resolved
    with pytest.raises(RequestError, match="more than the"):
        resolved.behind(length + 1, 1 << 20)
