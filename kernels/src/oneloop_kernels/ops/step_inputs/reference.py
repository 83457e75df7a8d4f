"""A step's inputs in plain torch: what the kernels are compared with. It asks the device for counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.step_inputs import SampleOutput, SlotTables, StepInputs


class ReferenceStepOps:
    """See the contract."""

    __slots__ = ()

    def fetch(self, source: torch.Tensor, target: torch.Tensor, size_at: int) -> None:
        """See the contract."""
        num_bytes = int(source.view(torch.int64)[size_at])
        rounded = -(-num_bytes // 8) * 8
        target[:rounded].copy_(source[:rounded])

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
        _apply_deltas(slab, header_index, tables)
        header = slab["header"]
        rows, tokens = int(header[header_index["num_rows"]]), int(header[header_index["num_tokens"]])
        slots, scheduled, computed = (
            slab[name][:rows] for name in ("row_slot", "row_num_scheduled", "row_num_computed")
        )
        inputs.num_rows.fill_(rows)
        inputs.num_single.fill_(int(header[header_index["num_single"]]))
        inputs.row_slot.fill_(-1)[:rows] = slots
        inputs.seq_lens.zero_()[:rows] = computed + scheduled
        inputs.query_start.fill_(tokens)[:rows] = slab["query_start"][:rows]
        for buffer, padding in ((inputs.token_ids, 0), (inputs.positions, 0), (inputs.kv_slots, -1)):
            buffer[:num_tokens] = padding
        row_of_token = torch.repeat_interleave(torch.arange(rows), scheduled.cpu().long()).to(slots.device)
        position = computed[row_of_token] + torch.arange(tokens, device=slots.device)
        position = position - slab["query_start"][row_of_token]
        token_slot = slots[row_of_token].long()
        given = slab["token_ids"][:tokens]
        inputs.token_ids[:tokens] = torch.where(given < 0, tables.last_token[token_slot], given)
        inputs.positions[:tokens] = position
        blocks = tables.block_tables[token_slot, (position // block_size).long()].long()
        inputs.kv_slots[:tokens] = blocks * block_size + position % block_size

    def fork(
        self, slab: Mapping[str, torch.Tensor], header_index: Mapping[str, int], tables: SlotTables
    ) -> None:
        """See the contract."""
        _apply_deltas(slab, header_index, tables)
        slab["header"][header_index["num_block_deltas"]] = 0
        for index in range(int(slab["header"][header_index["num_forks"]])):
            width = int(slab["fork_num_blocks"][index])
            source, target = int(slab["fork_src"][index]), int(slab["fork_dst"][index])
            tables.block_tables[target, :width] = tables.block_tables[source, :width]

    def select_rows(
        self,
        slab: Mapping[str, torch.Tensor],
        header_index: Mapping[str, int],
        hidden: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See the contract."""
        count = int(slab["header"][header_index["num_samples"]])
        out[:count] = hidden[slab["sample_token_index"][:count].long()]

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
        count = int(slab["header"][header_index["num_samples"]])
        target.token[:count].copy_(output.token[:count])
        if logprobs:
            columns = output.logprob.shape[0] // output.rank.shape[0]
            target.rank[:count].copy_(output.rank[:count])
            target.logprob_token[: count * columns].copy_(output.logprob_token[: count * columns])
            target.logprob[: count * columns].copy_(output.logprob[: count * columns])
        counter += 1
        flag.copy_(counter)


def _apply_deltas(
    slab: Mapping[str, torch.Tensor], header_index: Mapping[str, int], tables: SlotTables
) -> None:
    count = int(slab["header"][header_index["num_block_deltas"]])
    where = (slab["delta_slot"][:count].long(), slab["delta_index"][:count].long())
    tables.block_tables[where] = slab["delta_block"][:count]


REFERENCE: Final = ReferenceStepOps()
