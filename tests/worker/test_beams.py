"""Beams, samples (many of them bound) and scored prompts in a pool that is too small: what each gets does not change.

Every call of the core is followed by its audit, and a step's block copies and table entries must not collide.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest

from oneloop.worker.inputs import SlabViews
from oneloop_core import Grammar, RequestError

VOCAB_SIZE = 97
CONSTRAINTS = (
    {},
    {"grammar": Grammar.from_automaton([{7: 1, 8: 1}, {9: 0, 10: 1}])},
    {"allowed_token_ids": list(range(0, VOCAB_SIZE, 3)), "bad_words": [[3], [6, 9]]},
    {"thinking_budget": 2, "thinking_end": [5, 6]},
)


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
            options |= rng.choice(CONSTRAINTS) | rng.choice([{}, {"prompt_logprobs": 0}])
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
        in_flight, turn, num_turns, held, num_masks = [], 0, 0, None, 0
        while core.has_work():
            num_turns += 1
            assert num_turns < 20_000
            if num_turns in aborts:
                core.abort(rng.choice(list(numbers)))
            # Nothing is launched behind a step that waits for its masks.
            step = core.schedule(slabs[turn % 3][0]) if held is None and len(in_flight) < 2 else None
            core.audit()
            if step is not None:
                buffer, views = slabs[turn % 3]
                check_step(views)
                logits = worker.runner.forward(views)
                in_flight.append((step, buffer))
                turn += 1
                if views.header().num_masked:
                    held = (step, buffer, views, logits)
                elif logits is not None:
                    worker.runner.sample(views, logits)
                if held is None or len(in_flight) > 1:
                    continue
            if held is None and not in_flight:
                assert not core.has_work()
                break
            if held is None or len(in_flight) > 1:
                for delta in core.commit(*in_flight.pop(0)):
                    assert delta.finish_reason != "error"
                    texts.setdefault((numbers[delta.request], delta.index), []).extend(delta.token_ids)
                core.audit()
            if held is not None:
                step, buffer, views, logits = held
                num_masks += core.fill_masks(step, buffer)
                worker.runner.sample(views, logits)
                held = None
                core.audit()
        stats = core.stats()
        assert stats.num_used_blocks == 0
        return texts, stats, num_masks

    return start


@pytest.mark.timeout(120)
def test_beams_in_too_small_a_pool(run):
    num_preemptions = num_texts = num_masks = 0
    for seed in range(40):
        rng = random.Random(seed)
        requests = some_requests(rng, rng.randint(2, 10))
        small = {
            "num_blocks": rng.choice([18, 22, 26, 30]),
            "max_num_batched_tokens": rng.choice([8, 16, 64]),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        starved, stats, masks = run(requests, **small)
        roomy, _, _ = run(requests, num_blocks=96, enable_prefix_caching=False)
        for place, text in starved.items():
            assert text == roomy[place], (seed, place)
        num_preemptions += stats.num_preemptions
        num_texts += len(starved)
        num_masks += masks
        run(requests, {rng.randint(1, 60) for _ in range(4)}, rng, **small)
    assert num_preemptions > 20
    assert num_texts > 200
    assert num_masks > 200
