"""The Rust core and the runner together, step by step: the texts do not depend on batching, chunks or preemption."""

from __future__ import annotations

import random

import pytest

from oneloop.worker.inputs import SlabViews


def drive(worker, core, buffers, requests, lookahead=True):
    """Run all requests to their end with two steps in flight; handle → sequence → tokens."""
    slabs = [(buffer, SlabViews.over(buffer, core.layout)) for buffer in buffers]
    handles = [core.submit(prompt, **options) for prompt, options in requests]
    texts = {
        (handle, n): []
        for handle, (_, options) in zip(handles, requests, strict=True)
        for n in range(options.get("n", 1))
    }
    in_flight, turn = [], 0
    while core.has_work():
        if len(in_flight) < (2 if lookahead else 1):
            buffer, views = slabs[turn % len(slabs)]
            step = core.schedule(buffer)
            if step is not None:
                check_deltas_are_distinct(views)
                worker.runner.execute(views)
                in_flight.append((step, buffer))
                turn += 1
                continue
        assert in_flight, "work, but neither a step to run nor one to commit"
        for delta in core.commit(*in_flight.pop(0)):
            texts[delta.request, delta.index] += delta.token_ids
            assert delta.finish_reason != "error"
        core.audit()
    return [
        [texts[handle, n] for n in range(options.get("n", 1))]
        for handle, (_, options) in zip(handles, requests, strict=True)
    ]


def check_deltas_are_distinct(views):
    """The runner writes a step's block-table deltas at once: no entry may be given twice."""
    count = views.header().num_block_deltas
    places = list(zip(views.delta_slot[:count].tolist(), views.delta_index[:count].tolist(), strict=True))
    assert len(set(places)) == len(places)


@pytest.fixture
def run(worker, core_factory, buffer_factory):
    """Run requests on a fresh core; the worker and its cache go on."""

    def start(requests, *, lookahead=True, **changes):
        core = core_factory(**changes)
        buffers = [buffer_factory(core.layout.num_bytes) for _ in range(3)]
        worker.runner.kv.storage.fill_(float("nan"))
        texts = drive(worker, core, buffers, requests, lookahead)
        stats = core.stats()
        assert stats.num_used_blocks == 0
        return texts, stats

    return start


def some_requests(count, seed=0, longest=20, **options):
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(97) for _ in range(rng.randint(1, 30))],
            {"max_tokens": rng.randint(4, longest), "ignore_eos": True, "seed": index} | options,
        )
        for index in range(count)
    ]


GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 1.0, "top_p": 0.9}
PENALIZED = {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LISTS = {"temperature": 1.0, "logit_bias": [(3, 4.0), (9, -100.0)], "stop_token_ids": [3], "min_tokens": 4}


@pytest.mark.parametrize(
    "options", [GREEDY, RANDOM, PENALIZED, LISTS], ids=["greedy", "random", "penalized", "lists"]
)
def test_texts_do_not_depend_on_the_batch(run, options):
    requests = some_requests(12, **options)
    together, _ = run(requests)
    alone = [run([request])[0][0] for request in requests]
    assert together == alone
    chunked, _ = run(requests, max_num_batched_tokens=9, max_num_seqs=8)
    assert chunked == alone
    in_step, _ = run(requests, lookahead=False)
    assert in_step == alone


@pytest.mark.parametrize("options", [GREEDY, RANDOM, PENALIZED], ids=["greedy", "random", "penalized"])
def test_texts_survive_preemption(run, options):
    requests = some_requests(10, seed=1, longest=50, **options)
    expected, calm = run(requests)
    starved, stats = run(requests, num_blocks=24)
    assert calm.num_preemptions == 0
    assert stats.num_preemptions > 0
    assert starved == expected


def test_prefix_hits_change_nothing(run):
    prefix = [11, 22, 33, 44, 55, 66, 77, 88, 9, 10, 11, 12]
    requests = [([*prefix, i], {"max_tokens": 6, "ignore_eos": True, **GREEDY}) for i in range(6)]
    cached, stats = run(requests)
    assert stats.num_prefix_hit_tokens > 0
    plain, stats = run(requests, enable_prefix_caching=False)
    assert stats.num_prefix_hit_tokens == 0
    assert cached == plain


def test_n_sequences_of_one_prompt(run):
    prompt = [5, 4, 3, 2, 1, 0]
    options = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, "seed": 3, "n": 4}
    (first,), _ = run([(prompt, options)])
    again = run([(prompt, options), *some_requests(3, **RANDOM)])[0][0]
    assert first == again
    assert len({tuple(text) for text in first}) == 4


def test_logprobs_come_back(worker, core_factory, buffer_factory):
    core = core_factory()
    buffer = buffer_factory(core.layout.num_bytes)
    views = SlabViews.over(buffer, core.layout)
    core.submit([1, 2, 3], max_tokens=1, temperature=0.0, logprobs=3)
    step = core.schedule(buffer)
    worker.runner.execute(views)
    (delta,) = core.commit(step, buffer)
    ((rank, entries),) = delta.logprobs
    assert rank == 1
    assert entries[0] == entries[1]
    values = [value for _, value in entries[1:]]
    assert values == sorted(values, reverse=True)
    assert len(entries) == 4


@pytest.mark.parametrize(
    "options", [GREEDY, RANDOM, PENALIZED | {"logprobs": 2}], ids=["greedy", "random", "penalized"]
)
def test_logits_that_are_nan_end_the_sequence_with_an_error(worker, core_factory, buffer_factory, options):
    worker.model.norm.weight.fill_(float("nan"))
    core = core_factory()
    slabs = [
        (b, SlabViews.over(b, core.layout)) for b in (buffer_factory(core.layout.num_bytes) for _ in range(2))
    ]
    core.submit([1, 2, 3], max_tokens=5, **options)
    steps = []
    for buffer, views in slabs:
        steps.append((core.schedule(buffer), buffer))
        worker.runner.execute(views)
    (delta,) = core.commit(*steps[0])
    assert (delta.finish_reason, delta.token_ids) == ("error", [])
    assert "NaN" in delta.error
    assert len(core.commit(*steps[1])) == 0
    core.audit()
