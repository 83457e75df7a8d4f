"""Steps written by hand: what the runner computes does not depend on how the work is cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneloop_kernels.testing import assert_close

PROMPT = [5, 17, 88, 2, 41, 41, 9, 63, 30]
OTHER = [7, 7, 1, 90, 54, 3]


@pytest.fixture(params=["auto", "fp8"])
def worker(request, worker_factory):
    """Keys and values in the model's type, and in 8 bits: what is read is always what was written."""
    return worker_factory(kv_cache_dtype=request.param)


def decode_step(make_step, slot, length, output_index, token=-1):
    return make_step(rows=[(slot, length, [token])], samples=[(slot, 0, output_index)], flags=0)


def test_tokens_one_by_one_equal_the_text_computed_anew(worker, make_step):
    expected = worker.continuation(PROMPT, 6)
    tokens = worker.run(worker.prompt_step(3, PROMPT, [11, 4, 60, 2], num_prompt_tokens=9))
    for index in range(1, 6):
        tokens += worker.run(decode_step(make_step, 3, len(PROMPT) + index - 1, index))
    assert tokens == expected
    assert len(set(tokens)) > 2


def test_given_and_remembered_tokens_give_the_same(worker, make_step):
    first = worker.run(worker.prompt_step(0, PROMPT, [1, 2, 3]))[0]
    remembered = worker.run(decode_step(make_step, 0, 9, 1))
    given = worker.run(decode_step(make_step, 0, 9, 1, token=first))
    assert remembered == given


def test_a_prompt_in_chunks_beside_decoding_rows(worker, make_step, make_sampling):
    """Slot 1 decodes while slot 0 is prefilled three tokens at a time; both end as if alone."""
    expected, expected_other = worker.continuation(PROMPT, 2), worker.continuation(OTHER, 4)
    other = worker.run(worker.prompt_step(1, OTHER, [20, 21, 22]))
    mixed = make_step(
        admitted={0: make_sampling()},
        deltas=[(0, 0, 30), (0, 1, 31), (0, 2, 32)],
        rows=[(1, 6, [-1]), (0, 0, PROMPT[:3])],
        samples=[(1, 0, 1)],
    )
    other += worker.run(mixed)
    other += worker.run(make_step(rows=[(1, 7, [-1]), (0, 3, PROMPT[3:6])], samples=[(1, 0, 2)]))
    last = worker.run(make_step(rows=[(1, 8, [-1]), (0, 6, PROMPT[6:])], samples=[(1, 0, 3), (0, 3, 0)]))
    other.append(last[0])
    ours = [last[1], *worker.run(decode_step(make_step, 0, 9, 1))]
    assert (ours, other) == (expected, expected_other)


def test_a_step_without_samples_and_one_without_rows(worker, make_step, make_sampling):
    expected = worker.continuation(PROMPT, 1)
    deltas = [(0, index, index) for index in range(3)]
    assert (
        worker.run(make_step(admitted={0: make_sampling()}, deltas=deltas, rows=[(0, 0, PROMPT[:5])])) == []
    )
    assert worker.run(make_step()) == []
    assert worker.run(make_step(rows=[(0, 5, PROMPT[5:])], samples=[(0, 3, 0)])) == expected


def test_a_prefix_of_another_row_in_the_same_step(worker, make_step, make_sampling):
    """Slot 1 starts with slot 0's first two blocks, which this very step computes."""
    text = [*PROMPT[:8], 70, 71]
    step = make_step(
        admitted={0: make_sampling(), 1: make_sampling()},
        deltas=[(0, 0, 40), (0, 1, 41), (0, 2, 42), (1, 0, 40), (1, 1, 41), (1, 2, 43)],
        rows=[(0, 0, PROMPT), (1, 8, text[8:])],
        samples=[(0, 8, 0), (1, 10, 0)],
    )
    assert worker.run(step) == worker.continuation(PROMPT, 1) + worker.continuation(text, 1)


def test_forks_share_the_prompt_and_copy_before_writing(worker, make_step, make_sampling):
    """Three samples from one prompt; the partial block is copied for all but one before the next step writes."""
    drawn = [make_sampling(temperature=1.0, seed=seed) for seed in (10, 11, 12)]
    step = make_step(
        admitted=dict(zip((0, 1, 2), drawn, strict=True)),
        deltas=[(0, 0, 50), (0, 1, 51), (0, 2, 52)],
        forks=[(0, 1, 3), (0, 2, 3)],
        rows=[(0, 0, PROMPT)],
        samples=[(0, 8, 0), (1, 8, 0), (2, 8, 0)],
    )
    first = worker.run(step)
    assert len(set(first)) > 1, "three seeds that draw one token show nothing"
    step = make_step(
        copies=[(52, 60), (52, 61)],
        deltas=[(1, 2, 60), (2, 2, 61)],
        rows=[(slot, 9, [-1]) for slot in range(3)],
        samples=[(slot, slot, 1) for slot in range(3)],
        flags=0,
    )
    second = worker.run(step)
    assert second == [worker.continuation([*PROMPT, token], 1)[0] for token in first]
    worker.runner.kv.storage[:, 52] = torch.nan  # slot 0's own block: the others must not read it
    step = make_step(rows=[(1, 10, [-1]), (2, 10, [-1])], samples=[(1, 0, 2), (2, 1, 2)], flags=0)
    expected = [worker.continuation([*PROMPT, first[i], second[i]], 1)[0] for i in (1, 2)]
    assert worker.run(step) == expected


def test_a_slot_used_again_is_fully_reset(worker, make_step):
    worker.run(
        worker.prompt_step(
            0, OTHER, [1, 2], temperature=2.0, top_k=3, seed=9, repetition_penalty=1.9, presence_penalty=2.0,
            bias={4: 100.0}, banned=(5,), min_tokens=9, history=tuple(OTHER), num_prompt_tokens=6, num_logprobs=3,
        )
    )  # fmt: skip
    again = worker.run(worker.prompt_step(0, PROMPT, [7, 8, 9]))
    again += worker.run(make_step(rows=[(0, 9, [-1])], samples=[(0, 0, 1)]))
    assert again == worker.continuation(PROMPT, 2)


def test_padding_rows_and_unwritten_blocks_are_never_read(worker, make_step, make_sampling):
    """The cache is NaN where nothing was written: with contexts of many lengths no NaN comes through."""
    prompts = [[slot + 1] * (slot * 4 + 1) for slot in range(5)]
    step = make_step(
        admitted={slot: make_sampling() for slot in range(5)},
        deltas=[(slot, index, slot * 8 + index) for slot in range(5) for index in range(6)],
        rows=[(slot, 0, prompt) for slot, prompt in enumerate(prompts)],
        samples=[(slot, sum(map(len, prompts[: slot + 1])) - 1, 0) for slot in range(5)],
    )
    first = worker.run(step)
    step = make_step(
        rows=[(slot, len(prompt), [-1]) for slot, prompt in enumerate(prompts)],
        samples=[(slot, slot, 1) for slot in range(5)],
        flags=0,
    )
    second = worker.run(step)
    for prompt, *tokens in zip(prompts, first, second, strict=True):
        assert tokens == worker.continuation(prompt, 2)


@pytest.mark.parametrize(
    "field", ["token_ids", "row_slot", "delta_block", "sample_token_index", "sample_slot"]
)
def test_what_is_out_of_range_is_an_error_not_an_access(worker, field):
    views = worker.slab.write(worker.prompt_step(0, PROMPT, [1, 2, 3]))
    getattr(views, field)[0] = 1_000_000
    with pytest.raises((IndexError, RuntimeError)):
        worker.runner.execute(views)


def test_nan_weights_give_no_token_and_the_step_in_flight_runs(worker, make_step):
    worker.model.norm.weight.fill_(float("nan"))
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "num_logprobs": 5}):
        assert worker.run(worker.prompt_step(0, PROMPT, [1, 2, 3], **sampling)) == [-1]
        assert worker.run(decode_step(make_step, 0, len(PROMPT), 1)) == [-1]


def test_logprobs_are_those_of_the_raw_logits(worker):
    """Asked beside bias and temperature, which change the choice but not the log-probabilities."""
    (token,) = worker.run(
        worker.prompt_step(2, PROMPT, [1, 2, 3], num_logprobs=4, bias={33: 100.0}, temperature=1.3)
    )
    assert token == 33
    hidden = worker.model.norm
    assert hidden is not None
    views = worker.slab.views
    columns = views.output_logprob_token[0, :5]
    assert columns[0] == 33
    fresh = raw_logits(worker, PROMPT).double().log_softmax(-1)
    assert columns[1:].tolist() == fresh.topk(4).indices.tolist()
    assert_close(
        torch.from_numpy(views.output_logprob[0, :5].copy()), fresh[torch.from_numpy(columns).long()]
    )
    assert views.output_rank[0] == int((fresh > fresh[33]).sum()) + 1


def raw_logits(worker, tokens):
    """Logits after the tokens, from the runner's model in one piece."""
    captured = []
    original = worker.model.compute_logits

    def capture(hidden):
        logits = original(hidden)
        captured.append(logits[0].clone())
        return logits

    worker.model.compute_logits = capture
    try:
        worker.run(worker.prompt_step(7, tokens, list(range(70, 70 + len(tokens)))[: (len(tokens) + 3) // 4]))
    finally:
        worker.model.compute_logits = original
    return captured[0]


def test_outputs_beyond_the_samples_are_left_alone(worker):
    views = worker.slab.write(worker.prompt_step(0, PROMPT, [1, 2, 3]))
    views.output_token[1:] = -77
    worker.runner.execute(views)
    assert np.all(views.output_token[1:] == -77)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_types_give_nearly_the_same_logprobs(worker, worker_factory, dtype):
    """The whole way in a short type, prefill and decode: log-probabilities stay near those of float32."""
    short = worker_factory(dtype=dtype)
    found = []
    for either in (worker, short):
        either.run(either.prompt_step(0, PROMPT[:6], [1, 2, 3]))
        step = either.prompt_step(1, PROMPT, [4, 5, 6], num_logprobs=20, bias={33: 100.0})
        assert either.run(step) == [33]
        views = either.slab.views
        found.append(
            dict(zip(views.output_logprob_token[0].tolist(), views.output_logprob[0].tolist(), strict=True))
        )
    exact, rounded = found
    shared = exact.keys() & rounded.keys()
    assert len(shared) >= 17
    worst = max(abs(exact[token] - rounded[token]) for token in shared)
    assert 0 < worst < 0.25
