"""A step's inputs as kernels. Parts that follow each other do so behind a barrier of their program, which costs less
than a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from oneloop_kernels.launch import INTERPRETED, pdl_options, pdl_supported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.step_inputs import SampleOutput, SlotTables, StepInputs

_FETCH_WORDS: Final = 256
_FETCH_PROGRAMS: Final = 32
"""64 KB at once, most of what a decode step uses of its slab; the rest in turns of 256 KB."""
_SELECT_BLOCK: Final = 1024
_BLOCK: Final = 64 if INTERPRETED else 1024
_NUM_WARPS: Final = 16
_PREPARE_BLOCK: Final = 64 if INTERPRETED else 512
_PREPARE_WARPS: Final = 8
_PREPARE_TOKENS: Final = 32 if INTERPRETED else 256


@triton.jit
def _fetch_kernel(
    source, target, capacity,
    SIZE_AT: tl.constexpr, BLOCK: tl.constexpr, LATER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Under way together with the size, which would take as long: what lies beyond it is dropped.
    words = tl.load(source + first, mask=first < capacity)
    num_words = ((tl.load(source + SIZE_AT) + 7) // 8).to(tl.int32)
    tl.store(target + first, words, mask=first < num_words)
    for start in range(PROGRAMS * BLOCK + tl.program_id(0) * LATER, num_words, PROGRAMS * LATER):
        index = start + tl.arange(0, LATER)
        tl.store(target + index, tl.load(source + index, mask=index < num_words), mask=index < num_words)


@triton.jit
def _apply_deltas(
    header,
    delta_slot,
    delta_index,
    delta_block,
    block_tables,
    WIDTH,
    NUM_DELTAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_deltas = tl.load(header + NUM_DELTAS).to(tl.int32)
    for start in range(0, num_deltas, BLOCK):
        index = start + tl.arange(0, BLOCK)
        live = index < num_deltas
        slot = tl.load(delta_slot + index, mask=live, other=0).to(tl.int64)
        column = tl.load(delta_index + index, mask=live, other=0)
        block = tl.load(delta_block + index, mask=live, other=0)
        tl.store(block_tables + slot * WIDTH + column, block, mask=live)


@triton.jit
def _fill_rows(
    num_rows, num_tokens, row_slot, row_num_scheduled, row_num_computed, query_start,
    out_row_slot, out_seq_lens, out_query_start, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, MAX_ROWS + 1, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < num_rows
        within = row < MAX_ROWS
        slot = tl.load(row_slot + row, mask=live, other=-1)
        length = tl.load(row_num_computed + row, mask=live, other=0)
        length += tl.load(row_num_scheduled + row, mask=live, other=0)
        first = tl.load(query_start + row, mask=live, other=0)
        tl.store(out_row_slot + row, slot, mask=within)
        tl.store(out_seq_lens + row, length, mask=within)
        tl.store(out_query_start + row, tl.where(live, first, num_tokens), mask=row <= MAX_ROWS)


@triton.jit
def _row_of(token, num_single, num_rows, query_start, mask, SEARCH_STEPS: tl.constexpr):
    """The last row whose first token is not beyond this one; rows of one token come first."""
    low = tl.where(token < num_single, token, tl.minimum(num_single, num_rows - 1))
    high = tl.where(token < num_single, token, num_rows - 1)
    if tl.max(token, 0) >= num_single:
        for _ in range(SEARCH_STEPS):
            middle = (low + high + 1) // 2
            not_beyond = tl.load(query_start + middle, mask=mask & (low < high), other=0) <= token
            low = tl.where(not_beyond & (low < high), middle, low)
            high = tl.where(not_beyond, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _fill_tokens(
    token, num_rows, num_single, num_tokens, row_slot, row_num_computed, query_start, token_ids, block_tables,
    last_token, out_token_ids, out_positions, out_kv_slots,
    WIDTH, BUCKET, BLOCK_SIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    live = token < num_tokens
    row = _row_of(token, num_single, num_rows, query_start, live, SEARCH_STEPS)
    slot = tl.load(row_slot + row, mask=live, other=0).to(tl.int64)
    position = tl.load(row_num_computed + row, mask=live, other=0)
    position += token - tl.load(query_start + row, mask=live, other=0)
    position = tl.where(live, position, 0)
    given = tl.load(token_ids + token, mask=live, other=0)
    own = tl.load(last_token + slot, mask=live & (given < 0), other=0)
    block = tl.load(block_tables + slot * WIDTH + position // BLOCK_SIZE, mask=live, other=0)
    kv_slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    within = token < BUCKET
    tl.store(out_token_ids + token, tl.where(given < 0, own, given), mask=within)
    tl.store(out_positions + token, position, mask=within)
    tl.store(out_kv_slots + token, tl.where(live, kv_slot, -1), mask=within)


@triton.jit(do_not_specialize=["BUCKET"])
def _prepare_kernel(
    header, delta_slot, delta_index, delta_block, row_slot, row_num_scheduled, row_num_computed, query_start, token_ids,
    block_tables, last_token, out_token_ids, out_positions, out_kv_slots, out_row_slot, out_seq_lens, out_query_start,
    out_num_rows, out_num_single, WIDTH, BUCKET,
    NUM_ROWS: tl.constexpr, NUM_TOKENS: tl.constexpr, NUM_SINGLE: tl.constexpr, NUM_DELTAS: tl.constexpr,
    MAX_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 fills the rows, each of the others TOKENS tokens. All apply the deltas: every one reads its own."""
    if USE_PDL:  # for what follows; this kernel is launched without, so all before it has ended
        tl.extra.cuda.gdc_launch_dependents()
    num_rows = tl.load(header + NUM_ROWS).to(tl.int32)
    num_tokens = tl.load(header + NUM_TOKENS).to(tl.int32)
    num_single = tl.load(header + NUM_SINGLE).to(tl.int32)
    _apply_deltas(header, delta_slot, delta_index, delta_block, block_tables, WIDTH, NUM_DELTAS, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(out_num_rows, num_rows)
        tl.store(out_num_single, num_single)
        _fill_rows(
            num_rows, num_tokens, row_slot, row_num_scheduled, row_num_computed, query_start,
            out_row_slot, out_seq_lens, out_query_start, MAX_ROWS, BLOCK,
        )  # fmt: skip
    else:
        tl.debug_barrier()
        _fill_tokens(
            (tl.program_id(0) - 1) * TOKENS + tl.arange(0, TOKENS),
            num_rows, num_single, num_tokens, row_slot, row_num_computed, query_start, token_ids, block_tables,
            last_token, out_token_ids, out_positions, out_kv_slots, WIDTH, BUCKET, BLOCK_SIZE, SEARCH_STEPS,
        )  # fmt: skip


@triton.jit
def _fork_kernel(
    header, delta_slot, delta_index, delta_block, fork_src, fork_dst, fork_num_blocks, block_tables, WIDTH,
    NUM_DELTAS: tl.constexpr, NUM_FORKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _apply_deltas(header, delta_slot, delta_index, delta_block, block_tables, WIDTH, NUM_DELTAS, BLOCK)
    tl.debug_barrier()
    tl.store(header + NUM_DELTAS, tl.zeros((), tl.int64))
    num_forks = tl.load(header + NUM_FORKS).to(tl.int32)
    for fork in range(num_forks):
        source = tl.load(fork_src + fork).to(tl.int64) * WIDTH
        target = tl.load(fork_dst + fork).to(tl.int64) * WIDTH
        num_blocks = tl.load(fork_num_blocks + fork)
        for start in range(0, num_blocks, BLOCK):
            column = start + tl.arange(0, BLOCK)
            live = column < num_blocks
            block = tl.load(block_tables + source + column, mask=live, other=0)
            tl.store(block_tables + target + column, block, mask=live)


@triton.jit(do_not_specialize=["num_tokens"])
def _select_rows_kernel(
    header, hidden, index, out, num_tokens, SIZE,
    NUM_SAMPLES: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(header + NUM_SAMPLES).to(tl.int32)
    # Forks sample several times from one token: there may be more samples than programs, and than tokens.
    for sample in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(index + sample)
        row = tl.minimum(tl.maximum(row, 0), num_tokens - 1).to(tl.int64)
        for start in range(tl.program_id(1) * BLOCK, SIZE, tl.num_programs(1) * BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(hidden + row * SIZE + column, mask=column < SIZE)
            tl.store(out + tl.cast(sample, tl.int64) * SIZE + column, value, mask=column < SIZE)


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@triton.jit
def _publish_kernel(
    header, token, rank, logprob_token, logprob, to_token, to_rank, to_logprob_token, to_logprob, counter, flag,
    NUM_SAMPLES: tl.constexpr, COLUMNS: tl.constexpr, LOGPROBS: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    count = tl.load(header + NUM_SAMPLES).to(tl.int32)
    value = tl.load(counter) + 1
    _copy(token, to_token, count, BLOCK)
    if LOGPROBS:
        _copy(rank, to_rank, count, BLOCK)
        _copy(logprob_token, to_logprob_token, count * COLUMNS, BLOCK)
        _copy(logprob, to_logprob, count * COLUMNS, BLOCK)
    tl.store(counter, value)
    if INTERPRETED:
        tl.store(flag, value)
    else:
        # The results of all threads must be visible to the host before the flag is: fence, barrier, release.
        tl.inline_asm_elementwise(
            "{ fence.acq_rel.sys; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        tl.atomic_xchg(flag, value, sem="release", scope="sys")


class TritonStepOps:
    """See the contract."""

    __slots__ = ()

    def fetch(self, source: torch.Tensor, target: torch.Tensor, size_at: int) -> None:
        """See the contract."""
        _fetch_kernel[(_FETCH_PROGRAMS,)](
            source.view(torch.int64), target.view(torch.int64), source.numel() // 8,
            SIZE_AT=size_at, BLOCK=_FETCH_WORDS, LATER=4 * _FETCH_WORDS, PROGRAMS=_FETCH_PROGRAMS, num_warps=4,
        )  # fmt: skip

    def prepare(
        self,
        slab: Mapping[str, torch.Tensor],
        header_index: Mapping[str, int],
        tables: SlotTables,
        inputs: StepInputs,
        *,
        num_tokens: int,
        block_size: int,
    ) -> None:
        """See the contract."""
        max_rows = inputs.row_slot.shape[0]
        _prepare_kernel[(1 + triton.cdiv(num_tokens, _PREPARE_TOKENS),)](
            slab["header"], slab["delta_slot"], slab["delta_index"], slab["delta_block"], slab["row_slot"],
            slab["row_num_scheduled"], slab["row_num_computed"], slab["query_start"], slab["token_ids"],
            tables.block_tables, tables.last_token, inputs.token_ids, inputs.positions, inputs.kv_slots,
            inputs.row_slot, inputs.seq_lens, inputs.query_start, inputs.num_rows, inputs.num_single,
            tables.block_tables.stride(0), num_tokens,
            NUM_ROWS=header_index["num_rows"], NUM_TOKENS=header_index["num_tokens"],
            NUM_SINGLE=header_index["num_single"], NUM_DELTAS=header_index["num_block_deltas"],
            MAX_ROWS=max_rows, BLOCK_SIZE=block_size, SEARCH_STEPS=max_rows.bit_length(),
            BLOCK=_PREPARE_BLOCK, TOKENS=_PREPARE_TOKENS, USE_PDL=pdl_supported(inputs.row_slot.device),
            num_warps=_PREPARE_WARPS,
        )  # fmt: skip

    def fork(
        self, slab: Mapping[str, torch.Tensor], header_index: Mapping[str, int], tables: SlotTables
    ) -> None:
        """See the contract."""
        _fork_kernel[(1,)](
            slab["header"], slab["delta_slot"], slab["delta_index"], slab["delta_block"], slab["fork_src"],
            slab["fork_dst"], slab["fork_num_blocks"], tables.block_tables, tables.block_tables.stride(0),
            NUM_DELTAS=header_index["num_block_deltas"], NUM_FORKS=header_index["num_forks"],
            BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip

    def select_rows(
        self,
        slab: Mapping[str, torch.Tensor],
        header_index: Mapping[str, int],
        hidden: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See the contract."""
        size = hidden.shape[1]
        _select_rows_kernel[(min(hidden.shape[0], out.shape[0]), triton.cdiv(size, _SELECT_BLOCK))](
            slab["header"], hidden, slab["sample_token_index"], out, hidden.shape[0], size,
            NUM_SAMPLES=header_index["num_samples"], BLOCK=_SELECT_BLOCK, num_warps=4, **pdl_options(hidden.device),
        )  # fmt: skip

    def publish(
        self,
        output: SampleOutput,
        target: SampleOutput,
        slab: Mapping[str, torch.Tensor],
        header_index: Mapping[str, int],
        counter: torch.Tensor,
        flag: torch.Tensor,
        *,
        logprobs: bool,
    ) -> None:
        """See the contract."""
        _publish_kernel[(1,)](
            slab["header"], output.token, output.rank, output.logprob_token, output.logprob,
            target.token, target.rank, target.logprob_token, target.logprob, counter, flag,
            NUM_SAMPLES=header_index["num_samples"], COLUMNS=output.logprob.shape[0] // output.rank.shape[0],
            LOGPROBS=logprobs, INTERPRETED=INTERPRETED, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
            **pdl_options(counter.device),
        )  # fmt: skip


TRITON: Final = TritonStepOps()
