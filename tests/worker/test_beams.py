"""Beams, samples and scored prompts together in a pool that is too small for them: what each gets does not change.

Every call of the core is followed by its audit, and a step's block copies and table entries must not collide.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

from oneloop.worker.inputs import SlabViews
from oneloop_core import RequestError

VOCAB_SIZE = 97


def some_requests(rng, count):
    requests = []
    for _ in range(count):
        length = rng.randint(1, 24)
        prompt = (
            [rng.randrange(VOCAB_SIZE) for _ in range(length)] if rng.random() < 0.6 else list(range(length))
        )
        kind = rng.random()
        options = {"max_tokens": rng.randint(1, 40), "ignore_eos": True}
        if kind < 0.55:
            rule = (rng.choice([0.0, 1.0, 2.0, -1.0]), rng.choice(["heuristic", "always", "never"]))
            options |= {
                "n": rng.randint(1, 5),
                "beam_search": rule,
                "stop_token_ids": [rng.randrange(VOCAB_SIZE)],
            }
        elif kind < 0.8:
            options |= {"n": rng.randint(1, 3), "temperature": rng.choice([0.0, 1.0]), "seed": 3}
        else:
            options = {"max_tokens": 0, "prompt_logprobs": 1}
        requests.append((prompt, options))
    return requests


def check_step(views):
    """No table entry is told twice, no block is copied over twice, or copied while it is copied over."""
    header = views.header()
    count = header.num_block_deltas
    places = Counter(zip(views.delta_slot[:count].tolist(), views.delta_index[:count].tolist(), strict=True))
    assert all(times == 1 for times in places.values())
    copies = header.num_cow
    sources, targets = set(views.cow_src[:copies].tolist()), set(views.cow_dst[:copies].tolist())
    assert len(targets) == copies
    assert not sources & targets


@pytest.fixture
def run(worker, core_factory, buffer_factory):
    """Run the requests that the core takes; (request, sequence) → tokens. aborts: turns in which one ends."""

    def start(requests, aborts=(), rng=None, **changes):
        core = core_factory(**changes)
        worker.runner.kv.storage.fill_(float("nan"))
        buffers = [buffer_factory(core.layout.num_bytes) for _ in range(3)]
        slabs = [(buffer, SlabViews.over(buffer, core.layout)) for buffer in buffers]
        texts, numbers = {}, {}
        for number, (prompt, options) in enumerate(requests):
            with suppress(RequestError):  # of beams that could not fit
                numbers[core.submit(prompt, **options)] = number
        in_flight, turn, num_turns = [], 0, 0
        while core.has_work():
            num_turns += 1
            assert num_turns < 20_000
            if num_turns in aborts:
                core.abort(rng.choice(list(numbers)))
            step = core.schedule(slabs[turn % 3][0]) if len(in_flight) < 2 else None
            core.audit()
            if step is not None:
                check_step(slabs[turn % 3][1])
                worker.runner.execute(slabs[turn % 3][1])
                in_flight.append((step, slabs[turn % 3][0]))
                turn += 1
                continue
            if not in_flight:
                assert not core.has_work()
                break
            for delta in core.commit(*in_flight.pop(0)):
                assert delta.finish_reason != "error"
                texts.setdefault((numbers[delta.request], delta.index), []).extend(delta.token_ids)
            core.audit()
        stats = core.stats()
        assert stats.num_used_blocks == 0
        return texts, stats

    return start


@pytest.mark.timeout(120)
def test_beams_in_too_small_a_pool(run):
    num_preemptions = num_texts = 0
    for seed in range(40):
        rng = random.Random(seed)
        requests = some_requests(rng, rng.randint(2, 10))
        small = {
            "num_blocks": rng.choice([18, 22, 26, 30]),
            "max_num_batched_tokens": rng.choice([8, 16, 64]),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        starved, stats = run(requests, **small)
        roomy, _ = run(requests, num_blocks=96, enable_prefix_caching=False)
        for place, text in starved.items():
            assert text == roomy[place], (seed, place)
        num_preemptions += stats.num_preemptions
        num_texts += len(starved)
        run(requests, {rng.randint(1, 60) for _ in range(4)}, rng, **small)
    assert num_preemptions > 20
    assert num_texts > 200
