"""The device's sampling kernels by themselves: the noise, how a row is divided, and the paths that few rows take."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from oneloop_kernels.ops.sampling.device import (
    FLOAT_COLUMNS,
    GROUP,
    INT_COLUMNS,
    MAX_CANDIDATES,
    MAX_SPLITS,
    EditTables,
    SampleScratch,
    SampleStep,
    SampleVariant,
    SlotSampling,
)
from oneloop_kernels.ops.sampling.reference import REFERENCE
from oneloop_kernels.ops.sampling.triton.common import noise_key, noise_of
from oneloop_kernels.ops.sampling.triton.configs import (
    FINISH_REGISTERS,
    FINISH_WARPS,
    GREEDY_REGISTERS,
    GREEDY_TOKENS_PER_THREAD,
    SCAN_TOKENS_PER_THREAD,
    Division,
    divide,
)
from oneloop_kernels.ops.sampling.triton.finish import finish_kernel
from oneloop_kernels.ops.sampling.triton.launch import launch_sample
from oneloop_kernels.ops.step_inputs import SampleOutput
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

RANDOM = SampleVariant(random=True, edits=False, penalties=False, logprobs=False)
GREEDY = SampleVariant(random=False, edits=False, penalties=False, logprobs=False)
LOGPROBS = SampleVariant(random=True, edits=False, penalties=False, logprobs=True)

# The interpreter computes with numpy, which warns where −∞ − −∞ is NaN and exp(big) is ∞; both are meant.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


@triton.jit
def _noise_kernel(seed, output_index, out_ptr, first_token, SIZE: tl.constexpr):  # noqa: N803
    token_ids = first_token + tl.arange(0, SIZE)
    factor, offset = noise_key(tl.load(seed), tl.load(output_index))
    tl.store(out_ptr + tl.arange(0, SIZE), noise_of(token_ids, token_ids // 128, factor, offset))


def test_noise_is_the_documented_one(inputs, kernel_device):
    """Within 2e-6: the special function unit's logarithms. A single wrong bit of the hash would show."""
    for first_token in (0, 100_000):
        seed = inputs.integers(-(2**63), 2**63 - 1, 1)
        index = inputs.integers(0, 1 << 20, 1, dtype=torch.int32)
        out = inputs.poisoned(4096, dtype=torch.float32)
        _noise_kernel[(1,)](seed, index, out, first_token, SIZE=4096)
        token_ids = torch.arange(first_token, first_token + 4096, dtype=torch.int32, device=kernel_device)
        expected = REFERENCE.noise(seed, index.long(), token_ids)[0]
        assert float((out - expected).abs().max()) < 4e-6


class Samples:
    """A step of one sample per row of logits, slot = row, parameters by column name."""

    def __init__(self, logits, **columns) -> None:
        num_rows, vocab_size = logits.shape
        device = logits.device
        self.logits = logits
        self.slots = SlotSampling.allocate(num_rows, device)
        defaults = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
        for name, value in (defaults | columns).items():
            values = torch.as_tensor(value, device=device)
            if name in FLOAT_COLUMNS:
                self.slots.floats[:, FLOAT_COLUMNS.index(name)] = values.float()
            else:
                self.slots.ints[:, INT_COLUMNS.index(name)] = values.int()
        self.slots.seeds.copy_(torch.arange(num_rows) * 7919)
        self.scratch = SampleScratch.allocate(num_rows, vocab_size, device)
        slab = {
            "header": torch.tensor([num_rows], device=device),
            "sample_slot": torch.arange(num_rows, dtype=torch.int32, device=device),
            "sample_output_index": torch.full((num_rows,), 5, dtype=torch.int32, device=device),
        }

        def ints(size):
            return torch.full((size,), -9, dtype=torch.int32, device=device)

        logprobs = torch.full((num_rows * 21,), float("nan"), device=device)
        self.output = SampleOutput(ints(num_rows), ints(num_rows), ints(num_rows * 21), logprobs)
        self.step = SampleStep(slab, {"num_samples": 0}, ints(num_rows), self.output)

    def run(self, variant, division=None, edits=None):
        """The tokens, on the CPU."""
        self.output.token.fill_(-9)
        launch_sample(self.logits, self.step, self.slots, self.scratch, edits, variant, division)
        return self.output.token.tolist()


def expected_tokens(samples: Samples) -> list[int]:
    """By sorting, in float64, ties by id; the noise is the reference's. Plain torch, on the device of the logits."""
    tokens = []
    floats = {name: samples.slots.floats[:, i].tolist() for i, name in enumerate(FLOAT_COLUMNS)}
    for row, logits in enumerate(samples.logits.double()):
        top_k = int(samples.slots.ints[row, INT_COLUMNS.index("top_k")])
        order = torch.sort(logits, descending=True, stable=True).indices
        if floats["temperature"][row] == 0.0:
            tokens.append(int(order[0]))
            continue
        scaled = (logits - logits.max()) / floats["temperature"][row]
        order = order[scaled[order].exp() >= floats["min_p"][row]]
        order = order[: top_k or None]
        mass = scaled[order].exp()
        before = mass.cumsum(0) - mass
        order = order[before < floats["top_p"][row] * mass.sum()]
        seed, output_index = samples.slots.seeds[row : row + 1], torch.tensor([5], device=order.device)
        noise = REFERENCE.noise(seed, output_index, order.to(torch.int32))[0]
        tokens.append(int(order[(scaled[order] + noise).argmax()]))
    return tokens


DIVISIONS = (Division(6, 1, 128, 4), Division(2, 2, 256, 4), Division(6, 1, 128, 4))


def test_any_division_of_the_rows_gives_the_same(inputs, kernel_dtype):
    """700 tokens, so the last part is not full. One division comes twice: nothing may be left over."""
    logits = inputs.normal(3, 700, dtype=kernel_dtype) * 2
    for variant, columns in (
        (GREEDY, {"temperature": 0.0}),
        (LOGPROBS, {"temperature": [0.0, 1.0, 0.8], "top_k": [0, 0, 30], "num_logprobs": [3, 0, 5]}),
    ):
        samples = Samples(logits, **columns)
        first = samples.run(variant)
        logprobs = samples.output.logprob.clone()
        for division in DIVISIONS:
            assert samples.run(variant, division) == first
            torch.testing.assert_close(samples.output.logprob, logprobs, equal_nan=True)


def test_rows_with_gaps_between_them(inputs, kernel_dtype):
    wide = inputs.poisoned(4, 640, dtype=kernel_dtype)
    wide[:, :528] = inputs.normal(4, 528, dtype=kernel_dtype)
    samples = Samples(wide[:, :528], top_p=[1.0, 0.5, 1.0, 0.9], top_k=[0, 0, 9, 0])
    assert samples.run(RANDOM) == expected_tokens(samples)


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_more_candidates_than_are_gathered_at_once(inputs, kernel_device, spread):
    """top_k beyond the candidates' table and among masses of ties, with and without top_p and min_p."""
    vocab_size = MAX_CANDIDATES + 600
    logits = inputs.normal(4, vocab_size) * spread
    logits[2] = 0.0
    logits[2, 77] = 1.0
    samples = Samples(
        logits,
        top_k=[vocab_size - 100, vocab_size - 1, 100, vocab_size - 50],
        top_p=[1.0, 0.7, 0.2, 0.999],
        min_p=[0.0, 0.0, 0.0, 1e-4],
    )
    assert samples.run(RANDOM) == expected_tokens(samples)


@pytest.mark.parametrize("steep", [False, True], ids=["flat", "steep"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_every_way_to_draw(inputs, kernel_device, kernel_dtype, steep, temperature):
    """Rows side by side that take every branch; of steep rows few groups can win, and those not first in order."""
    vocab_size = 151_936 if kernel_device.type == "cuda" else 1300
    logits = inputs.normal(12, vocab_size)
    if steep:
        places = torch.stack([inputs.permutation(vocab_size)[:40] for _ in range(12)])
        logits.scatter_(1, places, torch.linspace(12.0, 4.0, 40, device=logits.device).expand(12, -1))
    samples = Samples(
        logits.to(kernel_dtype),
        temperature=[temperature] * 11 + [0.0],
        top_k=[0, 0, 0, 50, 1, 40, 0, 0, 600, 0, 0, 0],
        top_p=[1.0, 0.9, 0.3, 1.0, 1.0, 0.8, 1.0, 0.7, 0.9, 1.0, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.05, 0.01, 0.0, 0.0, 0.0],
    )
    assert samples.run(RANDOM) == expected_tokens(samples)


def penalized(logits, history, presence, frequency, repetition) -> torch.Tensor:
    """float32, by the formula of the contract."""
    x, counts = logits.float(), history & 0x7FFFFFFF
    x = torch.where(history != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - counts * frequency - (counts > 0) * presence


@pytest.mark.parametrize("seen", [1, 40, 500], ids=["one_seen", "some_seen", "most_seen"])
@pytest.mark.parametrize("steep", [False, True], ids=["flat", "steep"])
def test_edits_count_for_marked_tokens_alone(inputs, kernel_device, kernel_dtype, steep, seen):
    """Every way to choose a token of penalized rows, beside one without penalties. What is not marked is poison.

    Marked are the first and the last token, and others; the token chosen is marked and counted.
    """
    vocab_size = 151_936 if kernel_device.type == "cuda" else 700
    num_rows = 10
    logits = inputs.normal(num_rows, vocab_size).to(kernel_dtype)
    history = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    for row in range(num_rows):
        tokens = inputs.permutation(vocab_size)[:seen]
        tokens[0] = (0, vocab_size - 1)[row % 2]
        history[row, tokens] = (
            torch.where(tokens % 3 == 0, -(1 << 31), 0).to(torch.int32) + (tokens % 5).int()
        )
        if steep:
            logits[row, tokens] = torch.linspace(12.0, 4.0, seen, device=logits.device).to(kernel_dtype)
    history[3] = 0
    bits = torch.zeros(num_rows, -(-vocab_size // GROUP) * GROUP, dtype=torch.int64, device=logits.device)
    bits[:, :vocab_size] = history != 0
    words = (bits.view(num_rows, -1, 32) << torch.arange(32, device=logits.device)).sum(-1)
    poison = torch.full(logits.shape, float("nan"), device=logits.device)
    edits = EditTables(poison, words.to(torch.int32), history.clone())
    columns = {
        "temperature": [0.0, 1.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 0.0],
        "top_k": [0, 0, 0, 0, 50, 40, 0, 600, 0, 0],
        "top_p": [1.0, 1.0, 0.9, 0.9, 1.0, 0.8, 1.0, 0.9, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.05, 0.0],
    }
    shape = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    expected = expected_tokens(Samples(penalized(logits, history, 0.5, 0.25, 1.5), **columns))
    samples = Samples(logits, **columns, **shape, penalized=1)
    samples.slots.ints[3, INT_COLUMNS.index("penalized")] = 0
    greedy, random = (
        SampleVariant(*kind, penalties=True, logprobs=False) for kind in ((False, True), (True, True))
    )
    assert samples.run(random, edits=edits) == expected
    for row, token in enumerate(expected):
        history[row, token] += row != 3
        bits[row, token] |= row != 3
    assert torch.equal(edits.history, history)
    words = (bits.view(num_rows, -1, 32) << torch.arange(32, device=logits.device)).sum(-1)
    assert torch.equal(edits.marks, words.to(torch.int32))
    samples.slots.floats[:, FLOAT_COLUMNS.index("temperature")] = 0.0
    best = penalized(logits, history, 0.5, 0.25, 1.5)
    assert samples.run(greedy, edits=edits) == best.max(-1).indices.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("variant", [GREEDY, RANDOM, LOGPROBS], ids=["greedy", "random", "logprobs"])
def test_rows_without_a_distribution(inputs, kernel_dtype, variant, value):
    """NaN and +∞ anywhere give −1 (and a valid last token), only −∞ gives token 0; the other rows hear nothing."""
    logits = inputs.normal(5, 700, dtype=kernel_dtype)
    logits[4] = -torch.inf
    options = {} if variant is GREEDY else {"top_p": [1.0, 0.9, 1.0, 1.0, 0.9], "top_k": [0, 0, 0, 9, 0]}
    columns = {"temperature": 0.0 if variant is GREEDY else 1.0, "num_logprobs": 2} | options
    expected = Samples(logits, **columns).run(variant)
    assert expected[4] == 0
    for row, place in ((1, 699), (3, 0)):
        logits[row, place] = value
        expected[row] = -1
    samples = Samples(logits, **columns)
    assert samples.run(variant) == expected
    assert all(0 <= token < 700 for token in samples.step.last_token.tolist())


def test_flat_and_steep_rows(inputs, kernel_device, kernel_dtype):
    """Nuclei from one token to nearly all; small top_p takes several rounds. On a GPU a vocabulary of real size."""
    vocab_size = 151_936 if kernel_device.type == "cuda" else 900
    spreads = torch.tensor([0.01, 0.5, 2.0, 8.0, 0.1, 1.0, 2.0, 2.0], device=inputs.device)
    samples = Samples(
        (inputs.normal(8, vocab_size) * spreads[:, None]).to(kernel_dtype),
        top_p=[0.9, 0.5, 0.9, 0.9, 0.001, 0.02, 1.0, 0.9],
        top_k=[0, 0, 0, 0, 0, 0, 50, 700],
        temperature=0.9,
    )
    assert samples.run(RANDOM) == expected_tokens(samples)


def test_divisions_cover_the_vocabulary():
    for vocab_size in (1, 127, 700, 32_000, 50_257, 128_256, 151_936, 262_144):
        for bucket in (1, 2, 8, 64, 256, 1024):
            for tokens_per_thread in (8, 16):
                division = divide(bucket, vocab_size, 132, tokens_per_thread)
                part = division.num_tiles * division.tile
                assert 0 <= division.splits * part - vocab_size < part, "no token twice, no part without one"
                assert division.splits <= MAX_SPLITS


def with_masks(samples, masks, rows):
    """Give the step of `samples` masks ([n, vocab_size] bool): rows[i] is sample i's, −1: none."""
    samples.step.slab["mask_word"] = packed(masks).flatten()
    samples.step.slab["sample_mask_row"] = torch.tensor(rows, dtype=torch.int32, device=masks.device)


@pytest.mark.parametrize("edited", [False, True], ids=["masks", "masks_and_edits"])
@pytest.mark.parametrize("allowed", [1, 40, 650], ids=["one_allowed", "some_allowed", "most_allowed"])
def test_masked_tokens_never_come(inputs, kernel_device, kernel_dtype, allowed, edited):
    """Every way to choose, beside rows without a mask; some share one. What is masked is the likeliest, or NaN.

    Where a row has no edits of its own, its slot's marks are what an earlier owner left: poison.
    """
    vocab_size = 151_936 if kernel_device.type == "cuda" else 700
    num_rows = 10
    logits = inputs.normal(num_rows, vocab_size).to(kernel_dtype)
    rows = [3, 0, 1, 2, 4, 5, -1, 6, 3, 5]
    masks = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=logits.device)
    for mask in masks:
        tokens = inputs.permutation(vocab_size)[: allowed * vocab_size // 700]
        mask[tokens] = True
        mask[[0, vocab_size - 1]] = True
    for row, mask_row in enumerate(rows):
        if mask_row >= 0:
            refused = torch.nonzero(~masks[mask_row])[:30, 0]
            logits[row, refused] = torch.tensor([30.0, torch.nan, torch.inf], device=logits.device).to(
                kernel_dtype
            )[torch.arange(len(refused)) % 3]
    columns = {
        "temperature": [0.0, 1.0, 1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 0.0],
        "top_k": [0, 0, 0, 0, 50, 40, 0, 600, 0, 0],
        "top_p": [1.0, 1.0, 0.9, 0.9, 1.0, 0.8, 1.0, 0.9, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.05, 0.0],
    }
    history = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    history[1::2, ::7] = 2
    wanted = logits.float().clone()  # float32 is not copied by itself
    if edited:
        wanted[1::2] = penalized(logits, history, 0.5, 0.25, 1.5)[1::2]
    for row, mask_row in enumerate(rows):
        if mask_row >= 0:
            REFERENCE.mask(wanted[row : row + 1], packed(masks[mask_row : mask_row + 1]))
    expected = expected_tokens(Samples(wanted, **columns))
    samples = Samples(logits, **columns, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    samples.slots.ints[1::2, INT_COLUMNS.index("penalized")] = int(edited)
    with_masks(samples, masks, rows)
    marks = packed(history != 0, GROUP)
    marks[::2] = -1
    poison = torch.full(logits.shape, float("nan"), device=logits.device)
    edits = EditTables(poison, marks, history.clone()) if edited else None
    for random in (True, False):
        if not random:
            samples.slots.floats[:, FLOAT_COLUMNS.index("temperature")] = 0.0
            columns["temperature"] = 0.0
            expected = expected_tokens(Samples(wanted, **columns))
        if edited:
            edits.history.copy_(history)
        variant = SampleVariant(random, edits=edited, penalties=edited, logprobs=False, masks=True)
        assert samples.run(variant, edits=edits) == expected


def packed(bits, multiple=32):
    """[rows, n] bool as int32 words, the lowest bit first, padded to a multiple."""
    num_rows, size = bits.shape
    padded = torch.zeros(num_rows, -(-size // multiple) * multiple, dtype=torch.int64, device=bits.device)
    padded[:, :size] = bits
    words = (padded.view(num_rows, -1, 32) << torch.arange(32, device=bits.device)).sum(-1)
    return words.to(torch.int32)


def test_log_probabilities_of_masked_rows_are_the_models(inputs, kernel_dtype):
    logits = inputs.normal(4, 700, dtype=kernel_dtype)
    masks = torch.zeros(2, 700, dtype=torch.bool, device=logits.device)
    masks[:, 5:30] = True
    columns = {"temperature": [0.0, 1.0, 0.0, 1.0], "num_logprobs": 5}
    samples = Samples(logits, **columns)
    with_masks(samples, masks, [0, 1, -1, -1])
    variant = SampleVariant(random=True, edits=False, penalties=False, logprobs=True, masks=True)
    tokens = samples.run(variant)
    assert all(5 <= token < 30 for token in tokens[:2])
    raw = logits.float().log_softmax(-1)
    shown = samples.output.logprob.view(4, 21)
    ids = samples.output.logprob_token.view(4, 21)
    for row, token in enumerate(tokens):
        torch.testing.assert_close(shown[row, 0], raw[row, token], rtol=1e-4, atol=1e-4)
        assert ids[row, 1] == raw[row].argmax()
        assert samples.output.rank[row] == 1 + int((raw[row] > raw[row, token]).sum())


def test_a_mask_that_allows_nothing_gives_a_valid_id(inputs):
    """The core never sends one; a kernel that would then read out of range must not exist all the same."""
    logits = inputs.normal(2, 300)
    samples = Samples(logits, temperature=[0.0, 1.0])
    with_masks(samples, torch.zeros(1, 300, dtype=torch.bool, device=logits.device), [0, 0])
    for variant in (RANDOM, GREEDY):
        tokens = samples.run(replace(variant, masks=True))
        assert all(0 <= token < 300 for token in tokens)


@pytest.mark.parametrize("masks", [False, True])
def test_compiled_for_hopper(masks):
    """Both passes over the logits read 16 bytes at a time, the next tile ahead, and spill no register."""
    row = {"logits_ptr": "*bf16", "edited_ptr": "*fp32", "header_ptr": "*i64"}
    row |= dict.fromkeys(("marks_ptr", "row_edited_ptr", "mask_row_ptr", "masks_ptr"), "*i32")
    row |= {"sample_slot_ptr": "*i32", "ints_ptr": "*i32", "logits_stride": "i32", "vocab_size": "i32"}
    sums = ("floats_ptr", "group_max_ptr", "group_sum_ptr", "raw_group_max_ptr", "raw_group_sum_ptr")
    scan = row | dict.fromkeys(sums, "*fp32") | dict.fromkeys(("edits", "logprobs", "num_tiles"), "i32")
    greedy = row | dict.fromkeys(("history_ptr", "partial_token_ptr", "ticket_ptr"), "*i32")
    greedy |= dict.fromkeys(("token_out_ptr", "last_token_ptr"), "*i32") | {"partial_max_ptr": "*fp32"}
    greedy |= dict.fromkeys(("edits", "penalties", "splits", "num_tiles"), "i32")
    switches = {"NUM_SAMPLES": 3, "USE_PDL": True, "MASKS": masks}
    module = "oneloop_kernels.ops.sampling.triton"
    specs = []
    for bucket in (1, 256):
        division = divide(bucket, 151_936, 132, SCAN_TOKENS_PER_THREAD)
        options = {"num_warps": division.num_warps, "maxnreg": division.scan_registers, "launch_pdl": True}
        constants = switches | {"TILE_GROUPS": division.tile // GROUP}
        unaligned = ("edits", "logprobs", "num_tiles")
        specs.append(KernelSpec(f"{module}.scan", "scan_kernel", scan, constants, options, unaligned))
        division = divide(bucket, 151_936, 132, GREEDY_TOKENS_PER_THREAD)
        options = {"num_warps": division.num_warps, "maxnreg": GREEDY_REGISTERS, "launch_pdl": True}
        constants = switches | {"BLOCK": division.tile}
        unaligned = ("edits", "penalties", "splits", "num_tiles")
        specs.append(KernelSpec(f"{module}.greedy", "greedy_kernel", greedy, constants, options, unaligned))
    for report in compile_all_for_hopper(specs):
        assert report.spilled == 0
        assert report.count(r"LDG\.E\.128$") >= 2


def test_the_finishing_kernel_compiled_for_hopper():
    """Two programs fit on a multiprocessor, and passes copy ahead. Nothing spills; with edits and masks, for which all
    parts are there twice, values that calls leave no registers for. Its parts are called: compiling it with all of them
    inlined takes seconds.
    """
    kinds = {"logits_ptr": "*bf16", "header_ptr": "*i64", "seeds_ptr": "*i64"}
    kinds |= dict.fromkeys(("edited_ptr", "floats_ptr", "candidate_logit_ptr", "logprob_ptr"), "*fp32")
    for name in inspect.signature(finish_kernel.fn).parameters:
        if not name.isupper() and name not in kinds:
            is_float = name.startswith(("group_", "raw_"))
            kinds[name] = ("*fp32" if is_float else "*i32") if name.endswith("_ptr") else "i32"
    constants = {
        "NUM_SAMPLES": 3,
        "LOGPROB_COLUMNS": 21,
        "TILE_GROUPS": 16,
        "PASS_GROUPS": 32,
    }
    constants |= {"PADDED_GROUPS": 2048, "USE_PDL": True}
    options = {"num_warps": FINISH_WARPS, "maxnreg": FINISH_REGISTERS, "launch_pdl": True}
    unaligned = ("num_groups", "penalties", "logprobs")
    module = "oneloop_kernels.ops.sampling.triton.finish"
    reports = compile_all_for_hopper(
        [
            KernelSpec(
                module,
                "finish_kernel",
                kinds,
                constants | {"EDITS": edits, "MASKS": masks},
                options,
                unaligned,
            )
            for edits, masks in ((False, False), (True, False), (True, True))
        ]
    )
    for report, most_spilled, calls in zip(reports, (0, 16, 64), (10, 20, 20), strict=True):
        assert report.spilled <= most_spilled
        assert report.registers <= FINISH_REGISTERS
        assert report.shared <= 100 << 10
        assert report.count(r"LDGSTS\.E\..*128") >= 8
        assert report.count(r"CALL") >= calls
