"""Scores by two kernels: a pass over the logits as the model gives them, then a program for each row.

They are the sampler's: the pass leaves the maximum and the sum of exponentials of every group of tokens, so that only
groups that can hold a likelier token are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.ops.sampling.device import GROUP, MAX_CANDIDATES
from oneloop_kernels.ops.sampling.triton.common import INF
from oneloop_kernels.ops.sampling.triton.configs import (
    FINISH_REGISTERS,
    FINISH_TILE,
    FINISH_WARPS,
    PASS_TILE,
    SCAN_TOKENS_PER_THREAD,
    divide,
)
from oneloop_kernels.ops.sampling.triton.finish import write_logprobs
from oneloop_kernels.ops.sampling.triton.passes import load_maxima
from oneloop_kernels.ops.sampling.triton.scan import scan_row

if TYPE_CHECKING:
    from oneloop_kernels.ops.scores import Scores

_GROUP: Final = tl.constexpr(GROUP)
_MAX_CANDIDATES: Final = tl.constexpr(MAX_CANDIDATES)


@triton.jit(do_not_specialize=["num_tiles"])
def score_scan_kernel(
    logits_ptr, group_max_ptr, group_sum_ptr, logits_stride, vocab_size, num_tiles,
    TILE_GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: [splits, rows]; num_tiles tiles of TILE_GROUPS · GROUP tokens each."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    at = row * ((vocab_size + _GROUP - 1) // _GROUP)
    maxima, sums = group_max_ptr + at, group_sum_ptr + at
    first_group = tl.program_id(0) * num_tiles * TILE_GROUPS
    scan_row(
        (logits_ptr + row * logits_stride,), first_group, num_tiles, vocab_size, 1.0, True, False,
        maxima, sums, maxima, sums, TILE_GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_top", "num_groups"])
def score_finish_kernel(
    logits_ptr, token_ptr, group_max_ptr, group_sum_ptr, groups_ptr, candidate_logit_ptr, candidate_token_ptr,
    rank_ptr, score_token_ptr, score_logprob_ptr, logits_stride, vocab_size, num_groups, num_top,
    COLUMNS: tl.constexpr, PADDED_COLUMNS: tl.constexpr, TILE_GROUPS: tl.constexpr, PASS_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: [rows]. COLUMNS of the scores, PADDED_COLUMNS ≥ them and PADDED_GROUPS ≥ num_groups powers of two."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int32)
    group_max_row = group_max_ptr + row * num_groups
    maxima, _ = load_maxima(group_max_row, num_groups, PADDED_GROUPS)
    if tl.max((~(maxima < INF)).to(tl.int32), 0) > 0:
        columns = tl.arange(0, PADDED_COLUMNS)
        written = columns <= num_top
        tl.store(rank_ptr + row, 1)
        tl.store(score_token_ptr + row * COLUMNS + columns, tl.where(columns == 0, token, 0), mask=written)
        tl.store(score_logprob_ptr + row * COLUMNS + columns, float("nan"), mask=written)
    else:
        write_logprobs(
            row, token, num_top, groups_ptr + row * num_groups, group_max_row, group_sum_ptr + row * num_groups,
            num_groups, candidate_logit_ptr + row * _MAX_CANDIDATES, candidate_token_ptr + row * _MAX_CANDIDATES,
            (logits_ptr + row * logits_stride,), vocab_size, rank_ptr, score_token_ptr, score_logprob_ptr,
            COLUMNS, TILE_GROUPS, PASS_GROUPS, PADDED_GROUPS,
        )  # fmt: skip


class TritonScoreOps:
    """See the contract."""

    __slots__ = ()

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, scores: Scores) -> None:
        """See the contract. The columns of the scores lie side by side."""
        count, vocab_size = len(token_ids), logits.shape[1]
        num_groups = triton.cdiv(vocab_size, GROUP)
        padded_groups = triton.next_power_of_2(num_groups)
        num_columns = scores.token_ids.shape[1]
        common = pdl_options(logits.device)

        def scratch(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(count, width, dtype=dtype, device=logits.device)

        group_max, group_sum = scratch(num_groups, torch.float32), scratch(num_groups, torch.float32)
        division = divide(logits.shape[0], vocab_size, num_sms(logits.device), SCAN_TOKENS_PER_THREAD)
        score_scan_kernel[(division.splits, count)](
            logits, group_max, group_sum, logits.stride(0), vocab_size, division.num_tiles,
            TILE_GROUPS=division.tile // GROUP, num_warps=division.num_warps, maxnreg=division.scan_registers,
            **common,
        )  # fmt: skip
        score_finish_kernel[(count,)](
            logits, token_ids, group_max, group_sum, scratch(num_groups, torch.int32),
            scratch(MAX_CANDIDATES, torch.float32), scratch(MAX_CANDIDATES, torch.int32),
            scores.ranks, scores.token_ids, scores.logprobs, logits.stride(0), vocab_size, num_groups, num_top,
            COLUMNS=num_columns, PADDED_COLUMNS=triton.next_power_of_2(num_columns),
            TILE_GROUPS=min(FINISH_TILE // GROUP, padded_groups),
            PASS_GROUPS=min(PASS_TILE // GROUP, padded_groups),
            PADDED_GROUPS=padded_groups, num_warps=FINISH_WARPS, maxnreg=FINISH_REGISTERS,
            **common,
        )  # fmt: skip


TRITON: Final = TritonScoreOps()
