"""Sampling as a GPU does it: kernels read the step from the slab and its slots' parameters from tables on the device.

The stages, their order and the noise are those of the family's first contract (`SamplingOps`), so a seed gives the same
tokens here and there, but for logits that differ in their last places. What is launched depends on nothing but the
bucket (a number of samples at least as large as the step's) and the variant, so it can be captured in a graph.

Of equal logits the lowest ids go first, wherever that decides: in the argmax, in top_k, in top_p and in the order of
the log-probabilities. A row of nothing but −∞ gives token 0; one with NaN or +∞ gives −1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import torch

from oneloop_kernels.ops.sampling import NOISE_GROUP
from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop_kernels.ops.step_inputs import SampleOutput

FLOAT_COLUMNS: Final = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
INT_COLUMNS: Final = ("top_k", "num_logprobs", "min_tokens", "num_bias", "num_banned", "penalized")
NUM_COLUMNS: Final = 8
"""Width of the tables of parameters: a slot's lie in one line of the cache."""
MAX_BIAS: Final = 1024
"""Entries of a slot's logit_bias (MAX_LOGIT_BIAS of the core)."""
MAX_BANNED: Final = 2048
"""Ids of a slot that min_tokens bans: stop ids and EOS ids (MAX_STOP_TOKEN_IDS of the core, for each)."""
GROUP: Final = NOISE_GROUP
"""Tokens whose maximum is kept: what looks for likely tokens, or the winner of a draw, reads only groups that can hold
one. The noise's groups, since the largest noise in one is known."""
WORDS_OF_GROUP: Final = GROUP // 32
"""Of marks, a bit for each token."""
MAX_CANDIDATES: Final = 2048
"""Tokens among which top_k looks at once. With 1,000 groups and more it is enough for top_k up to about 800."""
MAX_RANKED: Final = 256
"""Candidates that are ordered by comparing each with each; more of them by bisection."""
MAX_SPLITS: Final = 256
"""Parts of the vocabulary that programs share a row in."""


@dataclass(frozen=True, slots=True)
class SampleVariant:
    """Which stages the launches have. A row that does not ask for one of them is not touched by it.

    random: some rows may not be greedy. edits: some may have bans, bias or penalties. penalties: their history is kept.
    logprobs: some may ask for log-probabilities. masks: some may have a mask.
    """

    random: bool
    edits: bool
    penalties: bool
    logprobs: bool
    masks: bool = False


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling parameters by slot, written by `admit`.

    floats: [max_num_seqs, NUM_COLUMNS] float32, FLOAT_COLUMNS first. ints: the same in int32, INT_COLUMNS first.
    seeds: [max_num_seqs] int64. bias_token, bias_value: [max_num_seqs, MAX_BIAS]. banned_token: [max_num_seqs,
    MAX_BANNED] int32.
    """

    floats: torch.Tensor
    ints: torch.Tensor
    seeds: torch.Tensor
    bias_token: torch.Tensor
    bias_value: torch.Tensor
    banned_token: torch.Tensor

    @classmethod
    def allocate(cls, max_num_seqs: int, device: torch.device) -> SlotSampling:
        """Slots that nobody has been admitted to are greedy and want nothing."""
        ints = torch.zeros(max_num_seqs, NUM_COLUMNS, dtype=torch.int32, device=device)
        ints[:, INT_COLUMNS.index("num_logprobs")] = -1
        return cls(
            floats=torch.zeros(max_num_seqs, NUM_COLUMNS, device=device),
            ints=ints,
            seeds=torch.zeros(max_num_seqs, dtype=torch.int64, device=device),
            bias_token=torch.zeros(max_num_seqs, MAX_BIAS, dtype=torch.int32, device=device),
            bias_value=torch.zeros(max_num_seqs, MAX_BIAS, device=device),
            banned_token=torch.zeros(max_num_seqs, MAX_BANNED, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """What the launches of one step hand to each other; R samples at most.

    partial_max: [R, MAX_SPLITS] float32 and partial_token: [R, MAX_SPLITS] int32, of a part of the vocabulary each.
    tickets: [R] int32, 0 between steps. group_max, group_sum (of exponentials at the row's temperature, relative to
    the maximum): [R, num_groups] float32, of the edited logits; raw_group_max, raw_group_sum: of the model's, at
    temperature 1. groups: [R, num_groups] int32. candidate_logit, candidate_token: [R, MAX_CANDIDATES]. row_edited:
    [R] int32.
    """

    partial_max: torch.Tensor
    partial_token: torch.Tensor
    tickets: torch.Tensor
    group_max: torch.Tensor
    group_sum: torch.Tensor
    raw_group_max: torch.Tensor
    raw_group_sum: torch.Tensor
    groups: torch.Tensor
    candidate_logit: torch.Tensor
    candidate_token: torch.Tensor
    row_edited: torch.Tensor

    @classmethod
    def allocate(cls, max_samples: int, vocab_size: int, device: torch.device) -> SampleScratch:
        """About 42 KB per sample for a vocabulary of 150,000."""
        num_groups = -(-vocab_size // GROUP)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(max_samples, *shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(max_samples, *shape, device=device)

        return cls(
            partial_max=floats(MAX_SPLITS),
            partial_token=ints(MAX_SPLITS),
            tickets=ints(),
            group_max=floats(num_groups),
            group_sum=floats(num_groups),
            raw_group_max=floats(num_groups),
            raw_group_sum=floats(num_groups),
            groups=ints(num_groups),
            candidate_logit=floats(MAX_CANDIDATES),
            candidate_token=ints(MAX_CANDIDATES),
            row_edited=ints(),
        )


@dataclass(frozen=True, slots=True)
class EditTables:
    """Only there once a request wants its logits edited.

    logits: [max_samples, vocab_size] float32, the edited logits of rows that want it, of the slot's marked tokens
    alone. marks: [max_num_seqs, mark_words(vocab_size)] int32, a bit for each token, the lowest first: those of the
    slot's lists, and with penalties those of prompt and output. history: [max_num_seqs, vocab_size] int32 of slots with
    penalties: how often the output holds the token, and the sign bit where the prompt does; None before the first
    request with penalties.
    """

    logits: torch.Tensor
    marks: torch.Tensor
    history: torch.Tensor | None

    @classmethod
    def allocate(cls, max_num_seqs: int, vocab_size: int, device: torch.device) -> EditTables:
        """Without a history."""
        marks = torch.zeros(max_num_seqs, mark_words(vocab_size), dtype=torch.int32, device=device)
        return cls(torch.empty(max_num_seqs, vocab_size, device=device), marks, None)

    def with_history(self) -> EditTables:
        """The same tables, and a history."""
        if self.history is not None:
            return self
        return replace(
            self, history=torch.zeros(self.logits.shape, dtype=torch.int32, device=self.logits.device)
        )


def mark_words(vocab_size: int) -> int:
    """int32 words of a slot's marks: whole groups."""
    return -(-vocab_size // GROUP) * WORDS_OF_GROUP


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Where a step is read and its tokens go.

    slab: the device's copy by field name. last_token: [max_num_seqs] int32.
    """

    slab: Mapping[str, torch.Tensor]
    header_index: Mapping[str, int]
    last_token: torch.Tensor
    output: SampleOutput


class DeviceSamplingOps(Protocol):
    """Launches only: nothing waits for the device."""

    def admit(self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, num_admitted: int) -> None:
        """Take the parameters, bias and banned ids of admitted slots from the slab."""

    def admit_edits(
        self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, edits: EditTables, num_admitted: int
    ) -> None:
        """After `admit`: marks of admitted slots that want edits, and the history of those with penalties, anew.

        edits: with a history where an admitted slot has penalties.
        """

    def fork_history(
        self, slab: Mapping[str, torch.Tensor], slots: SlotSampling, edits: EditTables, num_forks: int
    ) -> None:
        """fork_dst takes over the history (and its marks) of fork_src where fork_dst uses penalties."""

    def sample(
        self,
        logits: torch.Tensor,
        step: SampleStep,
        slots: SlotSampling,
        scratch: SampleScratch,
        edits: EditTables | None,
        variant: SampleVariant,
    ) -> None:
        """Sample row i of the logits for slot sample_slot[i], for every sample of the step.

        logits: [bucket, vocab_size] of any float type, stride(1) = 1, bucket ≥ the step's samples; left as they are.
        edits: needed where the variant has edits, with a history where it has penalties. Writes output.token,
        last_token (a valid id also for NaN), the history's counts and marks, and for slots that ask rank, and columns
        0 to num_logprobs of logprob_token and logprob.

        Where the variant has masks, the slab's `sample_mask_row[i]` says which row of `mask_word` sample i has, −1:
        none. A token whose bit is not set there counts as −∞, whatever its logit; log-probabilities are the model's
        own.
        """


DEVICE_SAMPLING: Family[DeviceSamplingOps] = Family(
    "device_sampling",
    (Implementation("triton", "oneloop_kernels.ops.sampling.triton.launch", "TRITON", frozenset({"cuda"})),),
)
