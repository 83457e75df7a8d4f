"""Sampling of a step on a GPU: everything of a row is looked up by kernels, so a captured graph serves every step.

The order of the stages and their meaning are those of worker/sampling; the arithmetic is in
oneloop_kernels.ops.sampling.device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.worker.inputs import StepFlag
from oneloop_kernels.ops.sampling.device import (
    DEVICE_SAMPLING,
    EditTables,
    SampleScratch,
    SampleStep,
    SampleVariant,
    SlotSampling,
)

if TYPE_CHECKING:
    from oneloop.worker.gpu.slab import DeviceSlab
    from oneloop.worker.inputs import StepHeader
    from oneloop_kernels.ops.step_inputs import SampleOutput

__all__ = ["DeviceSampler", "SampleVariant"]

_EDITS = StepFlag.PENALTIES | StepFlag.BIAS | StepFlag.MIN_TOKENS


class DeviceSampler:
    """Samples the rows of the step in the device's slab; keeps the sampling parameters of its slots.

    Memory per slot, for a vocabulary of V: about 60 KB; with the first request that has a bias, min_tokens or
    penalties 4·V + V/8 bytes more, and with the first that has penalties another 4·V.
    """

    __slots__ = ("_device", "_edits", "_max_num_seqs", "_ops", "_scratch", "_slots", "_step", "_vocab_size")

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        slab: DeviceSlab,
        last_token: torch.Tensor,
        output: SampleOutput,
        device: torch.device,
    ) -> None:
        """last_token: [max_num_seqs] int32. output: buffers on the device for max_num_seqs samples."""
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._ops = DEVICE_SAMPLING.resolve(device, torch.float32)
        self._slots = SlotSampling.allocate(max_num_seqs, device)
        self._scratch = SampleScratch.allocate(max_num_seqs, vocab_size, device)
        self._step = SampleStep(slab.fields, slab.header_index, last_token, output)
        self._edits: EditTables | None = None

    def admit(self, header: StepHeader) -> None:
        """Take the parameters of the step's admitted slots from the slab."""
        if not header.num_admitted:
            return
        slab, slots = self._step.slab, self._slots
        self._ops.admit(slab, slots, header.num_admitted)
        if header.num_history or header.num_bias or header.num_banned:
            self._edits = self._edit_tables(history=bool(header.num_history))
        if self._edits is not None:
            self._ops.admit_edits(slab, slots, self._edits, header.num_admitted)

    def fork(self, header: StepHeader) -> None:
        """Forked slots take over the penalty history of their source. After `admit` of the same step."""
        # Without a table no slot has penalties: a source's history was admitted before.
        if header.num_forks and self._edits is not None and self._edits.history is not None:
            self._ops.fork_history(self._step.slab, self._slots, self._edits, header.num_forks)

    def variant(self, flags: int, max_logprobs: int, *, masks: bool = False) -> SampleVariant:
        """Which launches a step with these entries of the header needs.

        masks: whether samples have some. Makes the tables that they need where they are missing: call it before
        capturing `sample`, not within.
        """
        variant = SampleVariant(
            random=bool(flags & StepFlag.RANDOM),
            edits=bool(flags & _EDITS),
            penalties=bool(flags & StepFlag.PENALTIES),
            logprobs=bool(flags & StepFlag.LOGPROBS) and max_logprobs >= 0,
            masks=masks,
        )
        if variant.edits:
            self._edits = self._edit_tables(history=variant.penalties)
        return variant

    def all_variants(self) -> list[SampleVariant]:
        """Every one there is; makes all tables."""
        edits = (0, StepFlag.BIAS, StepFlag.PENALTIES)
        return [
            self.variant(random | edit | logprobs, 1, masks=masks)
            for random in (0, StepFlag.RANDOM)
            for edit in edits
            for logprobs in (0, StepFlag.LOGPROBS)
            for masks in (False, True)
        ]

    def drop_tables(self) -> None:
        """Of edits and penalties, before any request has used them: they are made anew when one does."""
        self._edits = None

    def sample(self, logits: torch.Tensor, num_samples_bucket: int, variant: SampleVariant) -> None:
        """Launch the sampling of all the step's samples, at most num_samples_bucket; row i of logits is sample i's.

        logits: [≥ num_samples_bucket, ≥ vocab_size] in the model's dtype, left as they are.
        """
        rows = logits[:num_samples_bucket, : self._vocab_size]
        self._ops.sample(rows, self._step, self._slots, self._scratch, self._edits, variant)

    def _edit_tables(self, *, history: bool) -> EditTables:
        """Made at the first use of bias, min_tokens or penalties, their history at the first use of penalties."""
        tables = self._edits or EditTables.allocate(self._max_num_seqs, self._vocab_size, self._device)
        return tables.with_history() if history else tables
