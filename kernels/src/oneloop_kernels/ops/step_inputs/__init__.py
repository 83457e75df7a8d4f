"""A step's way onto the device and back: slab in, block tables up to date, inputs of the forward pass, tokens out.

Everything that differs from step to step is read on the device, so that one captured graph serves every step that fits
its bucket. The field names are those of the slab (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Per-slot state that the inputs are made from.

    block_tables: [max_num_seqs, width] int32. last_token: [max_num_seqs] int32, each slot's last sampled token.
    """

    block_tables: torch.Tensor
    last_token: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the forward pass reads; T tokens and R rows at most. The buffers never move.

    token_ids, positions: [T] int32 (0 beyond the step's tokens). kv_slots: [T] int64, block · block_size + offset
    (−1 beyond). row_slot: [R] int32 (−1 beyond the step's rows). seq_lens: [R] int32, tokens with KV after the step
    (0 beyond). query_start: [R + 1] int32 (the number of tokens beyond). num_rows, num_single: [1] int32.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    row_slot: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    num_rows: torch.Tensor
    num_single: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What sampling leaves for the slab's output part; R samples at most.

    token, rank: [R] int32. logprob_token: [R · columns] int32, logprob: [R · columns] float32.
    """

    token: torch.Tensor
    rank: torch.Tensor
    logprob_token: torch.Tensor
    logprob: torch.Tensor


class StepOps(Protocol):
    """Launches only. `slab`: the device's copy by field name; `header_index`: where its header's entries stand."""

    def fetch(self, source: torch.Tensor, target: torch.Tensor, size_at: int) -> None:
        """Copy the used part of a slab (uint8, pinned host memory) to the device (uint8), rounded up to 8 bytes.

        size_at: which 8-byte word of the slab says how many bytes are used.
        """

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
        """Apply the step's block-table deltas and fill the inputs: all rows, and num_tokens tokens (the bucket)."""

    def fork(
        self, slab: Mapping[str, torch.Tensor], header_index: Mapping[str, int], tables: SlotTables
    ) -> None:
        """Apply the step's block-table deltas, take them off the header, then copy the forks' block-table prefixes."""

    def select_rows(
        self,
        slab: Mapping[str, torch.Tensor],
        header_index: Mapping[str, int],
        hidden: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """out[i] = hidden[sample_token_index[i]] for every sample of the step.

        hidden: [num_tokens, size], out: [R, size], contiguous. Samples may share a row of hidden, and outnumber
        its rows; an index out of range is moved into it.
        """

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
        """Copy the samples' results to the slab's output part, count the step, then set the flag to the count.

        target: the output fields of a slab in pinned host memory. counter: [1] int64 on the device, one more for every
        call. flag: [1] int64 in pinned host memory, set once all results are visible to the host. logprobs: whether
        ranks and log-probabilities go along.
        """


STEP_INPUTS: Family[StepOps] = Family(
    "step_inputs",
    (
        Implementation("triton", "oneloop_kernels.ops.step_inputs.triton", "TRITON", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.step_inputs.reference", "REFERENCE"),
    ),
)
