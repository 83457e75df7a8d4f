"""Which tokens each slot has seen: what the penalties look at. Allocated when a request first uses one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt


class TokenHistory:
    """Per slot: tokens of its prompt, and how often its output holds each token. Only slots with penalties are kept."""

    __slots__ = ("_device", "_in_prompt", "_max_num_seqs", "_output_counts", "_vocab_size")

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._in_prompt = torch.empty(0, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)

    def admit(
        self,
        slots: npt.NDArray[np.int32],
        penalized: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.int32],
        num_prompt_tokens: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
    ) -> None:
        """Reset the admitted slots that use penalties and count their known tokens.

        slots, penalized, num_prompt_tokens: [n]; starts: [n + 1] prefix sums into tokens: prompt, then output.
        """
        if not len(self._in_prompt):
            shape = (
                self._max_num_seqs,
                self._vocab_size,
            )  # rows are touched, hence paid for, as they are used
            self._in_prompt = torch.empty(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.empty(shape, dtype=torch.int32, device=self._device)
        fresh = self._index(slots[penalized])
        self._in_prompt.index_fill_(0, fresh, False)
        self._output_counts.index_fill_(0, fresh, 0)
        owner = np.repeat(np.arange(len(slots)), np.diff(starts))
        in_prompt = np.arange(len(tokens)) - starts[owner] < num_prompt_tokens[owner]
        counted = penalized[owner]
        in_prompt, in_output = in_prompt & counted, ~in_prompt & counted
        self._in_prompt[self._index(slots[owner[in_prompt]]), self._index(tokens[in_prompt])] = True
        self.append(self._index(slots[owner[in_output]]), self._index(tokens[in_output]))

    def fork(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Slots in target take over the history of those in source."""
        from_rows, to_rows = self._index(source), self._index(target)
        self._in_prompt[to_rows] = self._in_prompt[from_rows]
        self._output_counts[to_rows] = self._output_counts[from_rows]

    def append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more output token per entry. slots, tokens: [n] int64 on the device."""
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._output_counts.index_put_((slots, tokens), one, accumulate=True)

    def rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(in_prompt [n, vocab_size] bool, output_counts [n, vocab_size] int32) of slots [n] int64."""
        return self._in_prompt.index_select(0, slots), self._output_counts.index_select(0, slots)

    def _index(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        """Host integers as an index on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
