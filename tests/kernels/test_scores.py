"""Scores of given tokens: the kernels against the formula."""

from __future__ import annotations

import inspect

import pytest
import torch

from oneloop_kernels.ops.sampling.device import GROUP, MAX_RANKED
from oneloop_kernels.ops.sampling.triton.configs import (
    FINISH_REGISTERS,
    FINISH_WARPS,
    SCAN_TOKENS_PER_THREAD,
    divide,
)
from oneloop_kernels.ops.scores import SCORES, Scores
from oneloop_kernels.ops.scores.reference import REFERENCE
from oneloop_kernels.ops.scores.triton import TRITON, score_finish_kernel, score_scan_kernel
from oneloop_kernels.testing.hopper import KernelSpec, compile_all_for_hopper

COLUMNS = 21

# The interpreter computes with numpy, which warns where −∞ − −∞ is NaN; that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


def score(ops, logits, token_ids, num_top):
    scores = Scores.allocate(len(token_ids), COLUMNS, logits.device)
    ops.score(logits, token_ids, num_top, scores)
    return scores


def check(scores, logits, token_ids, num_top):
    """Against float64. Which of equal logits stand at which place is left open, not which logits they have."""
    logits = logits[: len(token_ids)].double()
    expected = logits.log_softmax(-1)
    own = expected.gather(1, token_ids[:, None].long())
    columns = torch.cat((own, expected.topk(num_top).values), 1)
    torch.testing.assert_close(scores.logprobs[:, : num_top + 1].double(), columns, rtol=1e-5, atol=2e-5)
    assert scores.ranks.tolist() == ((expected > own).sum(1) + 1).tolist()
    ids = scores.token_ids[:, : num_top + 1].long()
    assert torch.equal(ids[:, 0], token_ids.long())
    torch.testing.assert_close(expected.gather(1, ids), columns, rtol=0, atol=0)
    assert all(len(set(row)) == num_top for row in ids[:, 1:].tolist())
    assert not scores.token_ids[:, num_top + 1 :].any()
    assert not scores.logprobs[:, num_top + 1 :].any()


@pytest.mark.parametrize("ops", [TRITON, REFERENCE], ids=["triton", "reference"])
@pytest.mark.parametrize(("vocab_size", "num_top"), [(97, 5), (700, 0), (700, 20), (3000, 5), (20, 20)])
def test_scores(inputs, kernel_device, kernel_dtype, ops, vocab_size, num_top):
    """More rows of logits than tokens, in a wider table, as a head with rows for padding gives them."""
    wide = inputs.poisoned(9, vocab_size + 16, dtype=kernel_dtype)
    logits = wide[:, :vocab_size]
    logits.copy_(inputs.normal(9, vocab_size) * 3)
    logits[0] = logits[0].round()  # many ties
    token_ids = inputs.integers(0, vocab_size, 7, dtype=torch.int32)
    token_ids[1] = logits[1].argmax()
    token_ids[2] = logits[2].argmin()
    check(score(ops, logits, token_ids, num_top), logits, token_ids, num_top)


def test_masses_of_equal_logits(inputs, kernel_device):
    """More candidates than are ranked at once, and rows of nothing but one value."""
    logits = inputs.normal(3, 2 * MAX_RANKED + 50).round()
    logits[1] = 0.5
    token_ids = torch.tensor([3, 300, 5], dtype=torch.int32, device=kernel_device)
    check(score(TRITON, logits, token_ids, 20), logits, token_ids, 20)


@pytest.mark.parametrize("ops", [TRITON, REFERENCE], ids=["triton", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_gives_nothing_finite(inputs, kernel_device, ops, value):
    logits = inputs.normal(4, 300)
    logits[1, 299] = value
    logits[2] = -torch.inf
    logits[2, 7] = 1.0
    token_ids = torch.tensor([4, 5, 6, 7], dtype=torch.int32, device=kernel_device)
    scores = score(ops, logits, token_ids, 3)
    assert not scores.logprobs[1, 0].isfinite()
    assert int(scores.token_ids[1, 0]) == 5
    assert bool(((scores.token_ids >= 0) & (scores.token_ids < 300)).all())
    assert scores.logprobs[2, :2].tolist() == [-torch.inf, 0.0]
    assert scores.ranks[2] == 2
    rest = torch.tensor([0, 3], device=kernel_device)
    check(Scores(*(part[rest] for part in scores)), logits[rest], token_ids[rest], 3)


def test_which_is_taken():
    assert SCORES.resolve(torch.device("cpu"), torch.float32) is REFERENCE
    assert SCORES.resolve(torch.device("cuda"), torch.bfloat16) is TRITON


def kinds_of(kernel, *floats):
    """Types of a kernel's arguments."""
    kinds = {"logits_ptr": "*bf16"} | dict.fromkeys(floats, "*fp32")
    for name in inspect.signature(kernel.fn).parameters:
        if not name.isupper() and name not in kinds:
            kinds[name] = "*i32" if name.endswith("_ptr") else "i32"
    return kinds


def test_compiled_for_hopper():
    """The pass reads 16 bytes at a time; nothing spills."""
    division = divide(256, 128_256, 132, SCAN_TOKENS_PER_THREAD)
    sums = ("group_max_ptr", "group_sum_ptr")
    module = "oneloop_kernels.ops.scores.triton"
    scan = KernelSpec(
        module, "score_scan_kernel", kinds_of(score_scan_kernel, *sums),
        {"TILE_GROUPS": division.tile // GROUP, "USE_PDL": True},
        {"num_warps": division.num_warps, "maxnreg": division.scan_registers, "launch_pdl": True},
        ("num_tiles",),
    )  # fmt: skip
    finish = KernelSpec(
        module, "score_finish_kernel",
        kinds_of(score_finish_kernel, *sums, "candidate_logit_ptr", "score_logprob_ptr"),
        {
            "COLUMNS": COLUMNS, "PADDED_COLUMNS": 32, "TILE_GROUPS": 16, "PASS_GROUPS": 32, "PADDED_GROUPS": 1024,
            "USE_PDL": True,
        },
        {"num_warps": FINISH_WARPS, "maxnreg": FINISH_REGISTERS, "launch_pdl": True},
        ("num_groups", "num_top"),
    )  # fmt: skip
    scanned, finished = compile_all_for_hopper([scan, finish])
    assert scanned.spilled == finished.spilled == 0
    assert scanned.count(r"LDG\.E\.128$") >= 2
