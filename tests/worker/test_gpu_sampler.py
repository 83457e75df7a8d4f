"""The GPU's sampler against the CPU's, step by step on the same slabs: the same tokens, ranks and log-probabilities.

Where there is no GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oneloop.worker.gpu.sampler import DeviceSampler
from oneloop.worker.gpu.slab import DeviceSlab
from oneloop.worker.inputs import LOGPROB_COLUMNS, StepFlag
from oneloop.worker.rows import RowTable
from oneloop.worker.sampling.sampler import Sampler
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.step_inputs import SampleOutput
from oneloop_kernels.registry import prefer
from oneloop_kernels.testing import assert_close

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB = 151_936 if ON_GPU else 700
DTYPE = (
    torch.float32
)  # without ties, of which the CPU's top_k and top_p keep any; tests/kernels has the short types
NUM_SLOTS = 8
POISON = -77

# The interpreter computes with numpy, which warns where −∞ − −∞ is NaN and exp(big) is ∞; both are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning"),
    *([pytest.mark.gpu] if ON_GPU else []),
]


def make_logits(num_rows, seed=0, spread=2.0):
    """As the model would give them, and float32 for the CPU's sampler."""
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.to(DTYPE)


class Pair:
    """Both samplers, fed with the same steps."""

    def __init__(self, slab, layout, make_step) -> None:
        self.host, self.make_step = slab, make_step
        self.slab = DeviceSlab(layout, DEVICE)
        self.last_token = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE)
        self.output = SampleOutput(
            *(torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE) for _ in range(2)),
            torch.zeros(NUM_SLOTS * LOGPROB_COLUMNS, dtype=torch.int32, device=DEVICE),
            torch.zeros(NUM_SLOTS * LOGPROB_COLUMNS, device=DEVICE),
        )
        with prefer("triton"):
            self.device = DeviceSampler(
                max_num_seqs=NUM_SLOTS,
                vocab_size=VOCAB,
                slab=self.slab,
                last_token=self.last_token,
                output=self.output,
                device=DEVICE,
            )
        self.rows = RowTable(NUM_SLOTS, 1, VOCAB, torch.device("cpu"))
        self.cpu = Sampler(self.rows, torch.device("cpu"))

    def step(
        self,
        logits,
        *,
        admitted=None,
        slots=None,
        indices=None,
        flags=None,
        forks=(),
        bucket=None,
        masks=None,
    ):
        """Run a step on both and compare; the tokens. bucket: rows of logits that the device gets, garbage behind.

        masks: [n, VOCAB] bool of each sample, None: none.
        """
        slots = list(admitted or {}) if slots is None else slots
        indices = [0] * len(slots) if indices is None else indices
        samples = [(slot, 0, index) for slot, index in zip(slots, indices, strict=True)]
        step = self.make_step(admitted=admitted or {}, samples=samples, flags=flags, forks=list(forks))
        views = self.host.write(step)
        self.rows.apply(views, views.header())
        self.host.set_header("max_logprobs", int(self.rows.columns.num_logprobs[slots].max()))
        if masks is not None:
            views.sample_mask_row[: len(slots)] = [
                -1 if mask is None else row for row, mask in enumerate(masks)
            ]
            for row, mask in enumerate(masks):
                if mask is not None:
                    eight = np.packbits(mask, bitorder="little")
                    views.mask_word.view(np.uint8)[row, : len(eight)] = eight
            self.host.set_header("num_masked", len(slots))
        header = views.header()
        views.output_rank[:], views.output_logprob_token[:], views.output_logprob[:] = POISON, POISON, POISON
        expected = self.cpu.sample(logits.float().clone(), views, header).tolist()
        self.slab.storage.copy_(torch.frombuffer(self.host.buffer, dtype=torch.uint8))
        tokens = self.sample_on_device(logits, header, bucket)
        assert tokens[: len(slots)] == expected
        assert tokens[len(slots) :] == [POISON] * (NUM_SLOTS - len(slots)), "wrote beyond the samples"
        self._compare_logprobs(views, slots, expected)
        assert self.last_token[slots].tolist() == self.rows.last_token[slots].tolist()
        return expected

    def sample_on_device(self, logits, header, bucket=None):
        """All of output.token, which is poisoned before."""
        for buffer in (self.output.token, self.output.rank, self.output.logprob_token, self.output.logprob):
            buffer.fill_(POISON)
        padded = torch.full((bucket or len(logits), VOCAB), float("nan"), dtype=DTYPE)
        padded[: len(logits)] = logits
        self.device.admit(header)
        self.device.fork(header)
        masks = header.num_masked > 0
        variant = self.device.variant(header.flags, header.max_logprobs, masks=masks)
        self.device.sample(padded.to(DEVICE), len(padded), variant)
        return self.output.token.tolist()

    def _compare_logprobs(self, views, slots, tokens) -> None:
        wanted = self.rows.columns.num_logprobs[slots]
        ids = self.output.logprob_token.view(-1, LOGPROB_COLUMNS).cpu()
        values = self.output.logprob.view(-1, LOGPROB_COLUMNS).cpu()
        for row, count in enumerate(wanted):
            columns = 0 if views.output_rank[row] == POISON or tokens[row] < 0 else int(count) + 1
            assert ids[row, :columns].tolist() == views.output_logprob_token[row, :columns].tolist()
            if columns:
                assert_close(values[row, :columns], torch.from_numpy(views.output_logprob[row, :columns]))
                assert self.output.rank[row] == views.output_rank[row]
            assert bool((values[row, columns:] == POISON).all()), "wrote what was not asked for"


@pytest.fixture
def pair(make_slab, core_factory, make_step):
    """See Pair."""
    return Pair(make_slab(vocab_size=VOCAB), core_factory(vocab_size=VOCAB).layout, make_step)


def test_greedy(pair, make_sampling):
    admitted = {slot: make_sampling() for slot in (3, 0, 7, 5, 1)}
    logits = make_logits(5)
    assert pair.step(logits, admitted=admitted, flags=0) == logits.float().argmax(-1).tolist()
    pair.step(make_logits(2, seed=1), slots=[7, 3], flags=0, bucket=4)


def test_every_mixture_of_truncations(pair, make_sampling):
    shapes = [
        {}, {"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.02},
    ]  # fmt: skip
    for round_, spread in enumerate((1.0, 4.0)):
        admitted = {
            slot: make_sampling(temperature=0.5 + 0.2 * slot, seed=100 * round_ + slot, **shape)
            for slot, shape in enumerate(shapes)
        }
        for index in range(2):
            logits = make_logits(8, seed=10 * round_ + index, spread=spread)
            step = {"admitted": admitted} if index == 0 else {"slots": list(admitted)}
            pair.step(logits, indices=[index] * 8, flags=int(StepFlag.RANDOM), **step)


def test_limits_of_top_k_and_top_p(pair, make_sampling):
    shapes = [
        {"top_k": VOCAB}, {"top_k": VOCAB + 5}, {"top_k": VOCAB - 1}, {"top_k": 650, "top_p": 0.3},
        {"top_p": 1e-6}, {"top_p": 0.999999}, {"min_p": 0.999}, {"top_k": 3, "min_p": 0.5, "top_p": 0.5},
    ]  # fmt: skip
    admitted = {slot: make_sampling(temperature=1.0, seed=slot, **shape) for slot, shape in enumerate(shapes)}
    pair.step(make_logits(8, spread=0.5), admitted=admitted, flags=int(StepFlag.RANDOM))


def test_greedy_rows_among_random_ones_in_any_bucket(pair, make_sampling):
    admitted = {slot: make_sampling(temperature=slot % 3 * 0.7, seed=slot) for slot in (5, 1, 0, 3, 6)}
    logits = make_logits(5)
    tokens = pair.step(logits, admitted=admitted)
    for bucket in (5, 6, 8):
        assert pair.step(logits, slots=list(admitted), bucket=bucket) == tokens
    backwards = pair.step(logits.flip(0), slots=list(admitted)[::-1], bucket=7)
    assert backwards == tokens[::-1]


def test_extreme_temperatures(pair, make_sampling):
    logits = make_logits(6)
    temperatures = (0.0, 1e-5, 1e-4, 0.01, 50.0, 1e5)
    admitted = {slot: make_sampling(temperature=t, seed=9) for slot, t in enumerate(temperatures)}
    tokens = pair.step(logits, admitted=admitted)
    assert tokens[:3] == logits[:3].float().argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"presence_penalty": 1.0}, {"num_logprobs": 2}],
)
def test_a_row_with_nan_gets_no_token_and_harms_no_other(pair, make_sampling, options):
    logits = make_logits(3)
    admitted = {slot: make_sampling(**{"temperature": 1.0, "seed": slot} | options) for slot in (4, 1, 6)}
    flags = 0 if options.get("temperature") == 0.0 else None
    expected = pair.step(logits, admitted=admitted, flags=flags)
    logits[1, 150] = torch.nan
    views = pair.host.views
    header = views.header()
    assert pair.sample_on_device(logits, header)[:3] == [expected[0], -1, expected[2]]
    assert 0 <= int(pair.last_token[1]) < VOCAB


def test_infinite_logits(pair, make_sampling):
    logits = make_logits(4)
    logits[:, 3:] = -torch.inf
    logits[3] = -torch.inf
    shapes = [{}, {"top_k": 10}, {"top_p": 0.9}, {"temperature": 0.0}]
    admitted = {
        slot: make_sampling(**{"temperature": 1.0, "seed": 1} | shape) for slot, shape in enumerate(shapes)
    }
    assert max(pair.step(logits, admitted=admitted)) < 3
    logits[:, 600] = torch.inf
    header = pair.host.views.header()
    assert pair.sample_on_device(logits, header)[:4] == [-1] * 4


def test_ties_go_to_the_lowest_ids(pair, make_sampling):
    """All logits equal: top_k and top_p keep the first ids, and the argmax is the first."""
    logits = torch.zeros(4, VOCAB, dtype=DTYPE)
    shapes = [{"top_k": 7}, {"top_p": 7.5 / VOCAB}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.36}]
    drawn = [set() for _ in shapes]
    for seed in range(5):
        admitted = {
            slot: make_sampling(**{"temperature": 1.0, "seed": seed} | shape)
            for slot, shape in enumerate(shapes)
        }
        step = pair.make_step(admitted=admitted, samples=[(slot, 0, 0) for slot in range(4)], flags=1)
        header = pair.host.write(step).header()
        pair.slab.storage.copy_(torch.frombuffer(pair.host.buffer, dtype=torch.uint8))
        for row, token in enumerate(pair.sample_on_device(logits, header)[:4]):
            drawn[row].add(token)
    assert drawn[0] <= set(range(7))
    assert drawn[1] <= set(range(8))
    assert drawn[2] == {0}
    assert drawn[3] <= set(range(8))
    assert all(len(seen) > 1 for seen in (drawn[0], drawn[1], drawn[3]))


def test_bans_and_bias(pair, make_sampling):
    logits = make_logits(4)
    best, second = logits[0].float().topk(2).indices.tolist()
    admitted = {
        3: make_sampling(min_tokens=2, banned=(best, 1)),
        6: make_sampling(bias={10: 50.0, 11: 60.0}),
        2: make_sampling(temperature=0.8, seed=5, bias={600: 9.5, 12: 9.25}, banned=(12,), min_tokens=1),
        1: make_sampling(),
    }
    assert pair.step(logits, admitted=admitted)[:2] == [second, 11]
    assert pair.step(logits, slots=[3, 6, 2, 1], indices=[1] * 4)[0] == second
    assert pair.step(logits, slots=[3, 6, 2, 1], indices=[2] * 4)[0] == best
    assert pair.step(logits[:2], slots=[1, 3], indices=[2] * 2, flags=0)[1] == int(logits[1].float().argmax())
    pair.step(logits, admitted={6: make_sampling()}, slots=[6, 3, 2, 1])


def test_lists_of_full_length(pair, make_sampling):
    bias = {token % VOCAB: 0.01 * token - 5.0 for token in range(0, 5000, 5)}
    banned = tuple(range(0, 2 * 600, 2))
    admitted = {
        1: make_sampling(bias=bias),
        4: make_sampling(banned=tuple(token % VOCAB for token in banned), min_tokens=1, temperature=1.0),
        0: make_sampling(),
    }
    pair.step(make_logits(3), admitted=admitted)


def test_penalties_follow_the_output_as_it_grows(pair, make_sampling):
    """Two penalized rows and a plain one between them; slot 5 had three output tokens before."""
    one = make_sampling(repetition_penalty=1.5, frequency_penalty=0.4, history=(3, 3, 9), num_prompt_tokens=3)
    two = make_sampling(
        presence_penalty=1.5, frequency_penalty=-0.3, history=(8, 1, 2, 2, 70), num_prompt_tokens=2,
        temperature=0.6, bias={2: 3.0}, seed=3,
    )  # fmt: skip
    admitted = {0: one, 2: make_sampling(), 5: two}
    seen = set()
    for step in range(6):
        logits = make_logits(3, seed=step % 2, spread=0.7)
        tokens = pair.step(
            logits, admitted=admitted if step == 0 else None, slots=[0, 2, 5], indices=[step] * 3
        )
        seen.add(tokens[0])
    assert len(seen) > 2, "the penalties changed nothing"


def test_an_admitted_slot_forgets_its_predecessor_s_history(pair, make_sampling):
    shape = {"repetition_penalty": 5.0, "num_prompt_tokens": 2}
    logits = make_logits(1).abs() + 1
    logits[0, 4:6] = 50.0
    assert pair.step(logits, admitted={2: make_sampling(history=(4, 9), **shape)}) == [5]
    assert pair.step(logits, admitted={2: make_sampling(history=(5, 9), **shape)}) == [4]


def test_an_admitted_slot_forgets_its_predecessor_s_marks(pair, make_sampling):
    """What stays marked harms no token, but is read again in every step of the slot's later requests."""
    logits = make_logits(1)
    pair.step(
        logits, admitted={2: make_sampling(bias={7: 3.0, 40: 1.0}, repetition_penalty=2.0, history=(9,))}
    )
    pair.step(logits, admitted={2: make_sampling(bias={11: 3.0})})
    marks = pair.device._edits.marks[2].cpu()
    bits = (marks[:, None] >> torch.arange(32)) & 1
    assert bits.flatten().nonzero().flatten().tolist() == [11]


def test_forks_take_the_history_with_them(pair, make_sampling):
    shape = {"repetition_penalty": 3.0}
    logits = make_logits(2).abs() + 1
    logits[:, 4] = 100.0
    logits[:, 20] = 50.0
    admitted = {0: make_sampling(history=(4, 5), num_prompt_tokens=2, **shape), 6: make_sampling(**shape)}
    assert pair.step(logits, admitted=admitted, forks=[(0, 6, 0)]) == [20, 20]


def test_logprobs(pair, make_sampling):
    """Of the model's logits, whatever the edits; up to the most a slot may ask for."""
    admitted = {
        0: make_sampling(),
        1: make_sampling(num_logprobs=2, bias={7: 30.0}),
        2: make_sampling(num_logprobs=0, temperature=1.0, seed=3),
        3: make_sampling(num_logprobs=20, temperature=3.0, top_k=200, seed=4),
        4: make_sampling(num_logprobs=5, temperature=5.0, seed=5, presence_penalty=0.5, history=(1,)),
    }
    logits = make_logits(5)
    tokens = pair.step(logits, admitted=admitted)
    assert tokens[1] == 7
    pair.step(logits, slots=[4, 3, 2, 1, 0], indices=[1] * 5, bucket=8, flags=1 | 16)
    pair.step(logits[:1], slots=[1], flags=int(StepFlag.LOGPROBS))


def test_equal_logits_in_the_log_probabilities_go_by_id(pair, make_sampling):
    logits = torch.zeros(1, VOCAB, dtype=DTYPE)
    logits[0, 300] = 1.0
    step = pair.make_step(admitted={0: make_sampling(num_logprobs=4)}, samples=[(0, 0, 0)], flags=16)
    header = pair.host.write(step).header()
    pair.slab.storage.copy_(torch.frombuffer(pair.host.buffer, dtype=torch.uint8))
    assert pair.sample_on_device(logits, header)[0] == 300
    assert pair.output.logprob_token[:5].tolist() == [300, 300, 0, 1, 2]
    assert int(pair.output.rank[0]) == 1


def test_the_same_step_twice_gives_the_same(pair, make_sampling):
    """Nothing of a step is left for the next: tickets, lists of groups, candidates."""
    shapes = [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.7}, {"num_logprobs": 3}]
    admitted = {
        slot: make_sampling(**{"temperature": 1.0, "seed": 2} | shape) for slot, shape in enumerate(shapes)
    }
    logits = make_logits(5, seed=4)
    pair.step(logits, admitted=admitted)
    header = pair.host.views.header()
    first = [pair.sample_on_device(logits, header) for _ in range(3)]
    assert first[0] == first[1] == first[2]
    greedy = make_logits(5, seed=5)
    for _ in range(3):
        pair.step(greedy, slots=list(admitted), flags=0)


def test_draws_follow_the_distribution(pair, make_sampling):
    """Chi-square over draws of five tokens."""
    num_steps = 250 if ON_GPU else 9
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.12, 0.08])
    logits = torch.full((8, VOCAB), -40.0)
    logits[:, :5] = probabilities.log()
    counts = np.zeros(5)
    admitted = {slot: make_sampling(temperature=1.0, seed=slot) for slot in range(8)}
    step = pair.make_step(admitted=admitted, samples=[(slot, 0, 0) for slot in range(8)], flags=1)
    views = pair.host.write(step)
    for index in range(num_steps):
        views.sample_output_index[:8] = index
        pair.slab.storage.copy_(torch.frombuffer(pair.host.buffer, dtype=torch.uint8))
        for token in pair.sample_on_device(logits.to(DTYPE), views.header()):
            counts[token] += 1
    expected = 8 * num_steps * probabilities.numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 23.5, "less likely than 1 in 10,000"


@pytest.mark.parametrize("density", [0.01, 0.5])
def test_masks_go_before_everything(pair, make_sampling, density):
    """With lists, penalties and log-probabilities, beside rows that have no mask; and gone with the next step."""
    shapes = [
        {}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"bias": {3: 50.0, 4: -50.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "history": (1, 2, 3)}, {"num_logprobs": 4}, {"top_p": 0.5},
    ]  # fmt: skip
    admitted = {
        slot: make_sampling(**{"temperature": 1.0, "seed": slot} | shape) for slot, shape in enumerate(shapes)
    }
    rng = np.random.default_rng(7)
    masks = [None if slot in (3, 7) else rng.random(VOCAB) < density for slot in range(8)]
    for mask in masks:
        if mask is not None:
            mask[[0, VOCAB - 1]] = True
    tokens = pair.step(make_logits(8), admitted=admitted, masks=masks)
    assert all(mask is None or mask[token] for mask, token in zip(masks, tokens, strict=True))
    slots = list(admitted)
    pair.step(make_logits(8, seed=1), slots=slots, indices=[1] * 8)
    flags = int(StepFlag.RANDOM)
    pair.step(make_logits(8, seed=2), slots=slots, indices=[2] * 8, masks=masks[::-1], flags=flags)
    greedy = {slot: make_sampling() for slot in range(4)}
    pair.step(make_logits(4, seed=3), admitted=greedy, masks=masks[:4], flags=0)
