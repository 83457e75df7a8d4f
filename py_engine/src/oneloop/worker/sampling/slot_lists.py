"""Short lists of (token, value) per slot, kept flat: logit_bias, and the ids banned by min_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class Entries(NamedTuple):
    """Entries of a step's samples: the sample they belong to, the token, the value to add to its logit."""

    samples: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class SlotLists:
    """All entries of all slots in three flat arrays; a slot's entries are replaced when it is admitted."""

    __slots__ = ("_max_num_seqs", "_slots", "_tokens", "_values")

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._slots = np.empty(0, np.int64)
        self._tokens = np.empty(0, np.int64)
        self._values = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    def admit(
        self,
        slots: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        values: npt.NDArray[np.float32],
    ) -> None:
        """slots: [n] admitted; starts: [n + 1] prefix sums into tokens and values. Copies what it keeps."""
        if len(self._slots) == 0 and len(tokens) == 0:
            return
        replaced = np.zeros(self._max_num_seqs, np.bool_)
        replaced[slots] = True
        kept = ~replaced[self._slots]
        owners = np.repeat(slots, np.diff(starts))
        self._slots = np.concatenate((self._slots[kept], owners)).astype(np.int64)
        self._tokens = np.concatenate((self._tokens[kept], tokens)).astype(np.int64)
        self._values = np.concatenate((self._values[kept], values))

    def select(
        self, sample_slots: npt.NDArray[np.int32], wanted: npt.NDArray[np.bool_] | None = None
    ) -> Entries:
        """Entries of the slots that are sampled. wanted: [num_samples], samples to consider; None: all."""
        sample_of_slot = np.full(self._max_num_seqs, -1, np.int64)
        samples = np.arange(len(sample_slots))
        if wanted is not None:
            samples = samples[wanted]
        sample_of_slot[sample_slots[samples]] = samples
        owners = sample_of_slot[self._slots]
        chosen = owners >= 0
        return Entries(owners[chosen], self._tokens[chosen], self._values[chosen])
