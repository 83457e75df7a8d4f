"""Launches the kernels: which ones a variant has, and how a row is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from oneloop_kernels.launch import num_sms, pdl_options
from oneloop_kernels.ops.sampling.device import GROUP, MAX_BANNED, MAX_BIAS, mark_words
from oneloop_kernels.ops.sampling.triton.admit import (
    admit_kernel,
    clear_edits_kernel,
    fill_edits_kernel,
    fork_history_kernel,
)
from oneloop_kernels.ops.sampling.triton.configs import (
    FINISH_REGISTERS,
    FINISH_TILE,
    FINISH_WARPS,
    GREEDY_REGISTERS,
    GREEDY_TOKENS_PER_THREAD,
    PASS_TILE,
    SCAN_TOKENS_PER_THREAD,
    Division,
    divide,
)
from oneloop_kernels.ops.sampling.triton.edit import edit_kernel
from oneloop_kernels.ops.sampling.triton.finish import finish_kernel
from oneloop_kernels.ops.sampling.triton.greedy import greedy_kernel
from oneloop_kernels.ops.sampling.triton.scan import scan_kernel
from oneloop_kernels.order import order_is_fixed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.sampling.device import (
        EditTables,
        SampleScratch,
        SampleStep,
        SampleVariant,
        SlotSampling,
    )

_LIST_BLOCK: Final = 1024
_EDIT_LIST_BLOCK: Final = 256
_EDIT_WORDS: Final = 128
"""Of marks, that a program of the edits, a single warp, looks through: 4,096 tokens."""
_ROW_BLOCK: Final = 4096
_HISTORY_PROGRAMS: Final = 8
"""Programs that share the list of one slot's known tokens."""


class TritonSamplingOps:
    """See the contract."""

    __slots__ = ()

    def admit(self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, num_admitted: int) -> None:
        """See the contract."""
        admit_kernel[(num_admitted,)](
            slab["admitted_slot"],
            slab["admitted_temperature"],
            slab["admitted_top_p"],
            slab["admitted_min_p"],
            slab["admitted_repetition_penalty"],
            slab["admitted_presence_penalty"],
            slab["admitted_frequency_penalty"],
            slab["admitted_top_k"],
            slab["admitted_num_logprobs"],
            slab["admitted_min_tokens"],
            slab["admitted_seed"],
            slab["admitted_bias_start"],
            slab["bias_token"],
            slab["bias_value"],
            slab["admitted_banned_start"],
            slab["banned_token"],
            slots.floats,
            slots.ints,
            slots.seeds,
            slots.bias_token,
            slots.bias_value,
            slots.banned_token,
            MAX_BIAS=MAX_BIAS,
            MAX_BANNED=MAX_BANNED,
            BLOCK=_LIST_BLOCK,
        )

    def admit_edits(
        self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, edits: EditTables, num_admitted: int
    ) -> None:
        """See the contract."""
        vocab_size = edits.logits.shape[1]
        has_history = int(edits.history is not None)
        history = edits.marks if edits.history is None else edits.history  # without one it is not looked at
        clear_edits_kernel[(num_admitted, triton.cdiv(vocab_size, _ROW_BLOCK))](
            slab["admitted_slot"], slots.ints, history, edits.marks, vocab_size, has_history,
            BLOCK=_ROW_BLOCK, num_warps=8,
        )  # fmt: skip
        fill_edits_kernel[(num_admitted, _HISTORY_PROGRAMS)](
            slab["admitted_slot"],
            slab["admitted_history_start"],
            slab["admitted_num_prompt_tokens"],
            slab["history_token"],
            slots.ints,
            slots.bias_token,
            slots.banned_token,
            history,
            edits.marks,
            vocab_size,
            has_history,
            MAX_BIAS=MAX_BIAS,
            MAX_BANNED=MAX_BANNED,
            BLOCK=_LIST_BLOCK,
        )

    def fork_history(
        self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, edits: EditTables, num_forks: int
    ) -> None:
        """See the contract."""
        if edits.history is None:
            return
        vocab_size = edits.logits.shape[1]
        fork_history_kernel[(num_forks, triton.cdiv(vocab_size, _ROW_BLOCK))](
            slab["fork_src"], slab["fork_dst"], slots.ints, edits.history, edits.marks, vocab_size,
            BLOCK=_ROW_BLOCK, num_warps=8,
        )  # fmt: skip

    def sample(
        self,
        logits: torch.Tensor,
        step: SampleStep,
        slots: SlotSampling,
        scratch: SampleScratch,
        edits: EditTables | None,
        variant: SampleVariant,
    ) -> None:
        """See the contract."""
        launch_sample(logits, step, slots, scratch, edits, variant, None)


def launch_sample(
    logits: torch.Tensor,
    step: SampleStep,
    slots: SlotSampling,
    scratch: SampleScratch,
    edits: EditTables | None,
    variant: SampleVariant,
    division: Division | None,
) -> None:
    """`sample`, with a division of one's own where one is given."""
    bucket, vocab_size = logits.shape
    is_greedy = not (variant.random or variant.logprobs)
    if division is None:
        tokens_per_thread = GREEDY_TOKENS_PER_THREAD if is_greedy else SCAN_TOKENS_PER_THREAD
        division = divide(
            bucket,
            vocab_size,
            num_sms(logits.device),
            tokens_per_thread,
            largest_tile=order_is_fixed(),  # a group's exponentials are added up across the lanes of a tile
        )
    # Without edits no kernel looks at the tables; any address will do.
    edited = scratch.partial_max if edits is None else edits.logits
    marks = scratch.tickets if edits is None else edits.marks
    history = scratch.tickets if edits is None or edits.history is None else edits.history
    common = {"NUM_SAMPLES": step.header_index["num_samples"], **pdl_options(logits.device)}
    # Without masks no kernel looks at theirs.
    masked = (
        (step.slab["sample_mask_row"], step.slab["mask_word"]) if variant.masks else (scratch.tickets,) * 2
    )
    rows = (logits, edited, marks, scratch.row_edited, history, step.slab["header"], step.slab["sample_slot"])
    if variant.edits:
        edit_kernel[(triton.cdiv(mark_words(vocab_size), _EDIT_WORDS), bucket)](
            *rows, step.slab["sample_output_index"], slots.floats, slots.ints, slots.bias_token, slots.bias_value,
            slots.banned_token, logits.stride(0), vocab_size, int(variant.penalties),
            MAX_BIAS=MAX_BIAS, MAX_BANNED=MAX_BANNED, WORDS=_EDIT_WORDS, LIST_BLOCK=_EDIT_LIST_BLOCK, num_warps=1,
            enable_fp_fusion=False,  # the same roundings as the reference, which multiplies before it adds
            **common,
        )  # fmt: skip
    if is_greedy:
        greedy_kernel[(division.splits, bucket)](
            *rows, *masked, slots.ints, scratch.partial_max, scratch.partial_token, scratch.tickets, step.output.token,
            step.last_token, logits.stride(0), vocab_size, int(variant.edits), int(variant.penalties),
            division.splits, division.num_tiles,
            MASKS=variant.masks, BLOCK=division.tile, num_warps=division.num_warps, maxnreg=GREEDY_REGISTERS,
            **common,
        )  # fmt: skip
        return
    _launch_scan((*rows, *masked), slots, scratch, variant, division, common)
    _launch_finish((*rows, *masked), step, slots, scratch, variant, common)


def _launch_scan(
    rows: tuple[torch.Tensor, ...],
    slots: SlotSampling,
    scratch: SampleScratch,
    variant: SampleVariant,
    division: Division,
    common: Mapping[str, object],
) -> None:
    logits, edited, marks, row_edited, _, header, sample_slot, mask_row, masks = rows
    scan_kernel[(division.splits, logits.shape[0])](
        logits,
        edited,
        marks,
        row_edited,
        header,
        sample_slot,
        mask_row,
        masks,
        slots.floats,
        slots.ints,
        scratch.group_max,
        scratch.group_sum,
        scratch.raw_group_max,
        scratch.raw_group_sum,
        logits.stride(0),
        logits.shape[1],
        int(variant.edits),
        int(variant.logprobs),
        division.num_tiles,
        MASKS=variant.masks,
        TILE_GROUPS=division.tile // GROUP,
        num_warps=division.num_warps,
        maxnreg=division.scan_registers,
        **common,
    )


def _launch_finish(
    rows: tuple[torch.Tensor, ...],
    step: SampleStep,
    slots: SlotSampling,
    scratch: SampleScratch,
    variant: SampleVariant,
    common: Mapping[str, object],
) -> None:
    logits = rows[0]
    output = step.output
    num_groups = scratch.groups.shape[1]
    padded_groups = triton.next_power_of_2(num_groups)
    finish_kernel[(logits.shape[0],)](
        *rows,
        step.slab["sample_output_index"],
        slots.floats,
        slots.ints,
        slots.seeds,
        scratch.group_max,
        scratch.group_sum,
        scratch.raw_group_max,
        scratch.raw_group_sum,
        scratch.groups,
        scratch.candidate_logit,
        scratch.candidate_token,
        output.token,
        step.last_token,
        output.rank,
        output.logprob_token,
        output.logprob,
        logits.stride(0),
        logits.shape[1],
        num_groups,
        int(variant.penalties),
        int(variant.logprobs),
        EDITS=variant.edits,
        MASKS=variant.masks,
        LOGPROB_COLUMNS=output.logprob.shape[0] // output.rank.shape[0],
        TILE_GROUPS=min(FINISH_TILE // GROUP, padded_groups),
        PASS_GROUPS=min(PASS_TILE // GROUP, padded_groups),
        PADDED_GROUPS=padded_groups,
        num_warps=FINISH_WARPS,
        maxnreg=FINISH_REGISTERS,
        **common,
    )


TRITON: Final = TritonSamplingOps()
