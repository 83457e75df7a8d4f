"""What prompts' results may take: memory of a step, and places in its slab."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from oneloop.config import EngineConfig
from oneloop.executor.loading import ModelLoading
from oneloop.start_times import StartTimes
from oneloop.worker.inputs import SlabViews, aligned_buffer
from oneloop.worker.memory.cpu import logits_bytes
from oneloop.worker.memory.scores import MAX_SCORES_PER_STEP, SCORES_AT_ONCE, score_bytes
from oneloop.worker.prompt_results import PromptResults
from oneloop_core import Core, CoreConfig, RequestError


def test_logits_of_a_long_prompt_exist_a_few_rows_at_a_time() -> None:
    """H05: whatever the prompt's length, no more rows at once than the plan of the memory counts."""
    sizes: list[int] = []
    weight = torch.randn(50, 8)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return hidden @ weight.T

    spec = SimpleNamespace(vocab_size=47)  # the head has rows for padding
    model = SimpleNamespace(
        spec=spec, device=torch.device("cpu"), dtype=torch.float32, compute_logits=compute_logits
    )
    hidden = torch.randn(1000, 8)
    index, tokens = torch.randint(1000, (700,)), torch.randint(47, (700,))
    scores = PromptResults(model).score(hidden, index, tokens, 3)
    assert set(sizes) == {SCORES_AT_ONCE}
    assert len(sizes) == -(-700 // SCORES_AT_ONCE)
    expected = (hidden[index] @ weight.T)[:, :47].log_softmax(-1)
    own = expected.gather(1, tokens[:, None])
    torch.testing.assert_close(scores.logprobs[:, :1], own)
    best = expected.topk(3)
    torch.testing.assert_close(scores.logprobs[:, 1:4], best.values)
    assert scores.token_ids[:, 0].tolist() == tokens.tolist()
    assert scores.token_ids[:, 1:4].tolist() == best.indices.tolist()
    assert scores.ranks.tolist() == ((expected > own).sum(1) + 1).tolist()


def test_the_plan_counts_them(twin) -> None:
    config = EngineConfig.from_flat({"model": str(twin.folder), "device": "cpu", "max_num_seqs": 1})
    loading = ModelLoading(config, StartTimes())
    loading.locate(None)
    large = replace(loading.spec, vocab_size=200_000)
    assert logits_bytes(large, config) >= SCORES_AT_ONCE * 200_000 * 8
    assert score_bytes(large, 2) < 256 << 20  # of a 1 GiB that no peak may reach


def test_a_step_holds_so_many_scores_at_most() -> None:
    """Steps of 8,192 tokens have places for 2,048 scores; prompts that are not scored get the rest."""
    core = Core(
        CoreConfig(
            num_blocks=2048, max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=8192, vocab_size=100
        )
    )
    buffer = aligned_buffer(core.layout.num_bytes)
    views = SlabViews.over(buffer, core.layout)
    rng = random.Random(1)
    prompts = [[rng.randrange(100) for _ in range(length)] for length in (3000, 4000, 1000)]
    for prompt, options in zip(prompts, ({"prompt_logprobs": 0}, {}, {"prompt_logprobs": 2}), strict=True):
        core.submit(prompt, max_tokens=1, **options)
    scored = {}
    seen = []
    while core.has_work():
        step = core.schedule(buffer)
        assert step is not None
        header = views.header()
        seen.append((header.num_tokens, header.num_scores))
        assert header.num_scores <= MAX_SCORES_PER_STEP
        views.score_rank[: header.num_scores] = 1
        views.score_logprob[: header.num_scores] = -1.0
        views.score_logprob_token[: header.num_scores] = views.score_token[: header.num_scores, None]
        views.output_token[: header.num_samples] = 0
        for delta in core.commit(step, buffer):
            if delta.prompt_logprobs is not None:
                found = delta.prompt_logprobs.tokens()
                scored[delta.request] = [entries[0][0] for _, entries in found]
        core.audit()
    assert seen[0][1] == MAX_SCORES_PER_STEP
    assert seen[0][0] > MAX_SCORES_PER_STEP
    assert scored == {1: prompts[0][1:], 3: prompts[2][1:]}
    assert sum(count for _, count in seen) == 2999 + 999


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"pooling": "last"}, "pooling"), ({"pooling": "max", "max_tokens": 0}, "pooling"),
        ({"pooling": "last", "max_tokens": 0, "prompt_logprobs": 0}, "pooling"),
        ({"beam_search": (1.0, "soon")}, "beam_search"), ({"beam_search": (float("nan"), "never")}, "length_penalty"),
        ({"beam_search": (1.0, "never"), "logprobs": 1}, "beam_search"),
        ({"beam_search": (1.0, "never"), "n": 8, "max_tokens": 4000}, "beam_search"),
    ],
)  # fmt: skip
def test_the_core_refuses(options, field) -> None:
    config = CoreConfig(num_blocks=300, max_num_seqs=8, max_model_len=4200, vocab_size=100, hidden_size=4)
    with pytest.raises(RequestError) as caught:
        Core(config).submit([1, 2, 3], **options)
    assert caught.value.field == field
