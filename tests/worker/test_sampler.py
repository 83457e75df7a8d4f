"""The sampler on logits of our choice: which rows are touched, in which order, and what is remembered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneloop.worker.inputs import StepFlag
from oneloop.worker.sampling import masks as step_masks
from oneloop_kernels.testing import assert_close

VOCAB = 97


def logits_of(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture
def sample(worker, make_step):
    """Sample given logits: admitted slots, their logits and output indices → tokens."""

    def run(logits, *, admitted=None, slots=None, indices=None, flags=None, masks=None):
        """masks: of each sample [VOCAB] bool, or None; their rows in the slab go the other way round.

        Samples with one and the same mask share its row.
        """
        slots = list(admitted or {}) if slots is None else slots
        indices = [0] * len(slots) if indices is None else indices
        step = make_step(
            admitted=admitted or {},
            samples=[(slot, 0, index) for slot, index in zip(slots, indices, strict=True)],
            flags=flags,
        )
        views = worker.slab.write(step)
        for sample, mask in enumerate(masks or []):
            first = next(place for place, other in enumerate(masks) if other is mask)
            row = len(masks) - 1 - first
            views.sample_mask_row[sample] = -1 if mask is None else row
            if mask is not None:
                views.mask_word[row] = 0
                packed = np.packbits(mask.numpy(), bitorder="little")
                views.mask_word.view(np.uint8)[row, : len(packed)] = packed
        worker.slab.set_header("num_masked", len(masks or []))
        header = views.header()
        worker.runner.rows.apply(views, header)
        return worker.runner._sampler.sample(logits.clone(), views, header).tolist()

    return run


def test_greedy_rows_among_random_ones(sample, make_sampling):
    logits = logits_of(6)
    admitted = {slot: make_sampling(temperature=slot % 3 * 0.7, seed=slot) for slot in range(6)}
    tokens = sample(logits, admitted=admitted)
    assert tokens[0::3] == logits[0::3].argmax(-1).tolist()
    alone = [sample(logits[slot : slot + 1], admitted={slot: admitted[slot]})[0] for slot in range(6)]
    assert tokens == alone


def test_a_seeded_row_draws_the_same_whatever_else_is_in_the_batch(sample, make_sampling):
    logits = logits_of(8)
    wanted = make_sampling(temperature=1.1, top_p=0.95, seed=42)
    alone = sample(logits[:1], admitted={5: wanted}, indices=[17])[0]
    for seed in range(4):
        others = {
            slot: make_sampling(temperature=0.5 * seed, seed=seed + slot, top_k=seed * 3, min_p=0.05 * seed)
            for slot in (0, 7, 3)
        }
        batch = {0: others[0], 7: others[7], 2: wanted, 3: others[3]}
        rows = torch.stack((logits[1], logits[2], logits[0], logits[3]))
        assert sample(rows, admitted=batch, indices=[1, 2, 17, 3])[2] == alone
    across_indices = {sample(logits[:1], admitted={5: wanted}, indices=[i])[0] for i in range(40)}
    assert len(across_indices) > 5


def test_temperature_zero_is_greedy_and_the_least_that_the_core_lets_through_nearly_so(sample, make_sampling):
    logits = logits_of(2)
    admitted = {0: make_sampling(temperature=0.0), 1: make_sampling(temperature=1e-5)}
    assert sample(logits, admitted=admitted) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"presence_penalty": 1.0}]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_gets_no_token(worker, sample, make_sampling, options, value):
    """NaN or +∞ anywhere; other rows hear nothing of it."""
    logits = logits_of(3)
    admitted = {slot: make_sampling(**{"temperature": 1.0, "seed": slot} | options) for slot in (4, 1, 6)}
    expected = sample(logits, admitted=admitted)
    logits[1, 50] = value
    assert sample(logits, admitted=admitted) == [expected[0], -1, expected[2]]
    assert 0 <= int(worker.runner.rows.last_token[1]) < VOCAB


def test_bans_hold_until_min_tokens(sample, make_sampling):
    logits = logits_of(2)
    best, second = logits[0].topk(2).indices.tolist()
    admitted = {3: make_sampling(min_tokens=2, banned=(best, 1)), 6: make_sampling()}
    assert sample(logits, admitted=admitted) == [second, int(logits[1].argmax())]
    assert sample(logits, slots=[3, 6], indices=[1, 1]) == [second, int(logits[1].argmax())]
    assert sample(logits, slots=[3, 6], indices=[2, 2])[0] == best


def test_bias_moves_only_its_own_row(sample, make_sampling):
    logits = logits_of(3)
    admitted = {
        1: make_sampling(bias={10: 50.0, 11: 60.0}),
        2: make_sampling(),
        4: make_sampling(bias={12: 70.0}),
    }
    greedy = logits.argmax(-1).tolist()
    assert sample(logits, admitted=admitted) == [11, greedy[1], 12]
    assert sample(logits.flip(0), slots=[4, 2, 1]) == [12, greedy[1], 11]
    assert sample(logits, slots=[2, 4, 1], flags=0) == greedy, "a step without the flag looks at no list"
    assert sample(logits, admitted={1: make_sampling()}, slots=[1, 2, 4]) == [*greedy[:2], 12]


def test_a_ban_is_stronger_than_a_bias(sample, make_sampling):
    admitted = {0: make_sampling(bias={10: 100.0}, banned=(10,), min_tokens=1)}
    assert sample(logits_of(1), admitted=admitted)[0] != 10


def dense_penalties(logits, prompt, output, sampling):
    """By the formulas, token by token."""
    logits = logits.clone()
    for token in range(VOCAB):
        if token in prompt or token in output:
            factor = sampling.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = output.count(token)
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    return logits


def test_penalties_follow_the_output_as_it_grows(sample, make_sampling):
    """Two penalized rows and a plain one between them, eight steps; slot 5 had three output tokens before."""
    one = make_sampling(repetition_penalty=1.5, frequency_penalty=0.4, history=(3, 3, 9), num_prompt_tokens=3)
    two = make_sampling(
        presence_penalty=1.5, frequency_penalty=-0.3, history=(8, 1, 2, 2, 70), num_prompt_tokens=2
    )
    prompts, outputs = {0: [3, 3, 9], 5: [8, 1]}, {0: [], 5: [2, 2, 70]}
    admitted = {0: one, 2: make_sampling(), 5: two}
    plain = []
    for step in range(8):
        logits = logits_of(3, seed=step % 2)
        tokens = sample(logits, admitted=admitted if step == 0 else None, slots=[0, 2, 5], indices=[step] * 3)
        for slot, row, sampling in ((0, 0, one), (5, 2, two)):
            expected = dense_penalties(logits[row], prompts[slot], outputs[slot], sampling).argmax()
            assert tokens[row] == int(expected)
            outputs[slot].append(tokens[row])
        plain.append(tokens[1] == int(logits[1].argmax()))
    assert all(plain)
    assert len(set(outputs[0])) > 2, "the penalties changed nothing"


def test_forks_take_the_history_with_them(worker, sample, make_step, make_sampling):
    shape = {"repetition_penalty": 3.0}
    logits = logits_of(2).abs() + 1
    admitted = {0: make_sampling(history=(4, 5), num_prompt_tokens=2, **shape), 6: make_sampling(**shape)}
    views = worker.slab.write(make_step(admitted=admitted, forks=[(0, 6, 0)]))
    worker.runner.rows.apply(views, views.header())
    logits[:, 4] = 100.0
    logits[:, 20] = 50.0
    assert sample(logits, slots=[0, 6]) == [20, 20]


def test_order_of_the_stages(sample, make_sampling):
    """min_p looks at the distribution after bias, penalty and temperature: a change in any of them decides."""
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :3] = torch.tensor([1.0, 0.0, -1.0])

    def reachable(**changes):
        drawn = set()
        for seed in range(60):
            admitted = {0: make_sampling(seed=seed, **({"temperature": 1.0, "min_p": 0.2} | changes))}
            drawn.add(sample(logits, admitted=admitted)[0])
        return drawn

    assert reachable() == {0, 1}
    assert reachable(temperature=1.5) == {0, 1, 2}
    assert reachable(bias={2: 1.0}) == {0, 1, 2}
    assert reachable(presence_penalty=2.0, history=(0,)) == {1, 2, 0}
    assert reachable(top_k=1, min_p=0.0) == {0}
    assert reachable(min_p=0.0, top_p=0.7, temperature=1.2) == {0, 1}


def test_logprobs_only_where_asked(worker, sample, make_sampling):
    logits = logits_of(3)
    views = worker.slab.views
    views.output_rank[:] = -5
    views.output_logprob[:] = -5.0
    admitted = {
        0: make_sampling(),
        1: make_sampling(num_logprobs=2),
        2: make_sampling(num_logprobs=0, temperature=1.0),
    }
    tokens = sample(logits, admitted=admitted)
    expected = logits.log_softmax(-1)
    assert views.output_rank[0] == -5
    assert bool((views.output_logprob[0] == -5.0).all())
    assert views.output_logprob_token[1, :3].tolist() == [tokens[1], *logits[1].topk(2).indices.tolist()]
    for row in (1, 2):
        ids = torch.from_numpy(views.output_logprob_token[row, :1]).long()
        assert_close(torch.from_numpy(views.output_logprob[row, :1]), expected[row][ids])
    assert views.output_rank[1] == 1


def masks_of(num_allowed):
    """Masks of so many allowed tokens each, None: none."""
    generator = torch.Generator().manual_seed(9)
    order = [torch.rand(VOCAB, generator=generator).argsort().argsort() for _ in num_allowed]
    return [None if count is None else rank < count for count, rank in zip(num_allowed, order, strict=True)]


@pytest.mark.parametrize(
    "num_allowed",
    [[1, 3, 5, 50, 92, 96, None, 4], [2] * 8, [95] * 8, [40] * 8, [None] * 8, [VOCAB, 1, 1, 1, 1, 2, 2, 2]],
    ids=["mixed", "few", "few_banned", "half", "none", "all_or_one"],
)
def test_a_mask_takes_tokens_away_before_everything_else(sample, make_sampling, monkeypatch, num_allowed):
    """As if the model had given −∞: with bias, penalties, bans and every kind of draw, however many tokens are left."""
    monkeypatch.setattr(step_masks, "MAX_CANDIDATES", (2, 5))
    masks = masks_of(num_allowed)
    logits = logits_of(8, seed=5)
    masked = logits.clone()
    for row, mask in zip(masked, masks, strict=True):
        row[~mask if mask is not None else []] = -torch.inf
    kinds = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 2},
        {"min_p": 0.05, "temperature": 1.0}, {"temperature": 1.0, "top_p": 0.7},
        {"bias": {7: 5.0, 8: 6.0}}, {"presence_penalty": 2.0, "history": (3, 4)},
        {"temperature": 2.0, "banned": (1, 2), "min_tokens": 3},
    ]  # fmt: skip
    for seed in range(5):
        admitted = {slot: make_sampling(**({"seed": seed} | kinds[(slot + seed) % 8])) for slot in range(8)}
        expected = sample(masked, admitted=admitted)
        tokens = sample(logits, admitted=admitted, masks=masks)
        assert tokens == expected
        for token, mask in zip(tokens, masks, strict=True):
            assert mask is None or mask[token]


def test_samples_may_share_a_mask(sample, make_sampling):
    few, most = masks_of([3, 90])
    logits = logits_of(6, seed=8)
    admitted = {slot: make_sampling(temperature=0.9, seed=slot) for slot in range(6)}
    shared = [few, most, None, few, most, most]
    apart = [None if mask is None else mask.clone() for mask in shared]
    assert sample(logits, admitted=admitted, masks=shared) == sample(logits, admitted=admitted, masks=apart)


def test_what_a_mask_takes_away_may_be_no_number(sample, make_sampling, monkeypatch):
    """A row without a distribution is one where a token that may come has none."""
    monkeypatch.setattr(step_masks, "MAX_CANDIDATES", (2, 5))
    admitted = {slot: make_sampling(temperature=slot % 2 * 0.9, seed=slot) for slot in range(6)}
    masks = masks_of([3, 3, 94, 94, 50, 50])
    logits = logits_of(6)
    expected = sample(logits, admitted=admitted, masks=masks)
    for row, mask in zip(logits, masks, strict=True):
        row[~mask] = torch.nan
    assert sample(logits, admitted=admitted, masks=masks) == expected
    for row, mask in zip(logits, masks, strict=True):
        row[mask.nonzero()[-1]] = torch.inf
    assert sample(logits, admitted=admitted, masks=masks) == [-1] * 6


def test_log_probabilities_beside_a_mask_are_the_models(worker, sample, make_sampling):
    logits = logits_of(2)
    admitted = {0: make_sampling(num_logprobs=3), 1: make_sampling(num_logprobs=1, temperature=1.0)}
    tokens = sample(logits, admitted=admitted, masks=masks_of([2, 96]))
    views, expected = worker.slab.views, logits.log_softmax(-1)
    for row, num_top in ((0, 3), (1, 1)):
        ids = views.output_logprob_token[row, : num_top + 1].tolist()
        assert ids == [tokens[row], *logits[row].topk(num_top).indices.tolist()]
        assert_close(torch.from_numpy(views.output_logprob[row, : num_top + 1]), expected[row][ids])
        assert views.output_rank[row] == 1 + int((logits[row] > logits[row, tokens[row]]).sum())


def test_many_steps_of_admissions_keep_the_lists_short(worker, sample, make_sampling):
    for step in range(50):
        sample(
            logits_of(1), admitted={step % 4: make_sampling(bias={1: 1.0, 2: 2.0}, banned=(3,), min_tokens=1)}
        )
    assert len(worker.runner.rows.bias) == 8
    assert len(worker.runner.rows.banned) == 4


def test_flags_have_the_bits_of_the_contract():
    assert [flag.value for flag in StepFlag] == [1, 2, 4, 8, 16, 32]
