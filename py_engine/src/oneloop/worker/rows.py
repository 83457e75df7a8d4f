"""What the worker remembers per slot between steps, and how a step's slab changes it.

Facts that come from the slab stay on the host, where a step selects the rows it needs without asking the device; what
the device makes itself (last tokens) or only the device reads (block tables) lives there. No loop runs over requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from oneloop.worker.sampling.history import TokenHistory
from oneloop.worker.sampling.slot_lists import SlotLists

if TYPE_CHECKING:
    from oneloop.worker.inputs import SlabViews, StepHeader


class SamplingColumns:
    """Sampling parameters per slot, on the host. Meanings and neutral values are those of the slab's columns."""

    __slots__ = (
        "frequency_penalty",
        "min_p",
        "min_tokens",
        "num_logprobs",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "uses_penalties",
    )

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.min_tokens = np.zeros(max_num_seqs, np.int32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.uses_penalties = np.zeros(max_num_seqs, np.bool_)

    def admit(self, slab: SlabViews, num_admitted: int) -> None:
        """Reset the admitted slots from the slab's columns."""
        slots = slab.admitted_slot[:num_admitted]
        self.temperature[slots] = slab.admitted_temperature[:num_admitted]
        self.top_p[slots] = slab.admitted_top_p[:num_admitted]
        self.min_p[slots] = slab.admitted_min_p[:num_admitted]
        self.repetition_penalty[slots] = slab.admitted_repetition_penalty[:num_admitted]
        self.presence_penalty[slots] = slab.admitted_presence_penalty[:num_admitted]
        self.frequency_penalty[slots] = slab.admitted_frequency_penalty[:num_admitted]
        self.top_k[slots] = slab.admitted_top_k[:num_admitted]
        self.num_logprobs[slots] = slab.admitted_num_logprobs[:num_admitted]
        self.min_tokens[slots] = slab.admitted_min_tokens[:num_admitted]
        self.seed[slots] = slab.admitted_seed[:num_admitted]
        self.uses_penalties[slots] = (
            (self.repetition_penalty[slots] != 1.0)
            | (self.presence_penalty[slots] != 0.0)
            | (self.frequency_penalty[slots] != 0.0)
        )


class RowTable:
    """State of max_num_seqs slots.

    block_tables: [max_num_seqs, max_blocks] int32 on the device. last_token: [max_num_seqs] int64 on the device.
    """

    __slots__ = ("banned", "bias", "block_tables", "columns", "device", "history", "last_token")

    def __init__(
        self, max_num_seqs: int, max_blocks_per_seq: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.block_tables = torch.zeros(max_num_seqs, max_blocks_per_seq, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.columns = SamplingColumns(max_num_seqs)
        self.bias = SlotLists(max_num_seqs)
        self.banned = SlotLists(max_num_seqs)
        self.history = TokenHistory(max_num_seqs, vocab_size, device)

    def apply(self, slab: SlabViews, header: StepHeader) -> None:
        """Bring the tables up to the step: admitted rows, then block-table deltas, then forks."""
        if header.num_admitted:
            self._admit(slab, header)
        if header.num_block_deltas:
            count = header.num_block_deltas
            where = (self._index(slab.delta_slot[:count]), self._index(slab.delta_index[:count]))
            self.block_tables[where] = torch.from_numpy(slab.delta_block[:count]).to(self.device)
        if header.num_forks:
            self._fork(slab, header.num_forks)

    def _admit(self, slab: SlabViews, header: StepHeader) -> None:
        count = header.num_admitted
        slots = slab.admitted_slot[:count]
        self.columns.admit(slab, count)
        self.bias.admit(
            slots,
            slab.admitted_bias_start[: count + 1],
            slab.bias_token[: header.num_bias],
            slab.bias_value[: header.num_bias],
        )
        self.banned.admit(
            slots,
            slab.admitted_banned_start[: count + 1],
            slab.banned_token[: header.num_banned],
            np.full(header.num_banned, -np.inf, np.float32),
        )
        if self.columns.uses_penalties[slots].any():
            self.history.admit(
                slots,
                self.columns.uses_penalties[slots],
                slab.admitted_history_start[: count + 1],
                slab.admitted_num_prompt_tokens[:count],
                slab.history_token[: header.num_history],
            )

    def _fork(self, slab: SlabViews, count: int) -> None:
        source, target = slab.fork_src[:count], slab.fork_dst[:count]
        num_blocks = slab.fork_num_blocks[:count]
        width = int(num_blocks.max())
        if width:
            inherited = torch.from_numpy(np.arange(width) < num_blocks[:, None]).to(self.device)
            from_rows = self.block_tables[self._index(source), :width]
            to_index = self._index(target)
            self.block_tables[to_index, :width] = torch.where(
                inherited, from_rows, self.block_tables[to_index, :width]
            )
        penalized = self.columns.uses_penalties[target]
        if penalized.any():
            self.history.fork(source[penalized], target[penalized])

    def _index(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
        """Host integers as an index on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
