"""What a step gives beside tokens: log-probabilities of a prompt's tokens, sums of its hidden states, log-probabilities
of tokens that a request has named.

For any device. Logits are made of a few rows at a time, so that a long prompt takes no more memory than a
short one. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.worker.inputs import LOGPROB_COLUMNS
from oneloop.worker.memory.scores import POOLED_AT_ONCE, SCORES_AT_ONCE
from oneloop_kernels.ops.scores import SCORES, Scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from oneloop.models.base import Model


class PromptResults:
    """Computes them from the hidden states of a step. Has no state of its own."""

    __slots__ = ("_model", "_ops", "_rows_at_once")

    def __init__(self, model: Model, rows_at_once: int = SCORES_AT_ONCE) -> None:
        """rows_at_once: whose logits exist at a time."""
        self._model = model
        self._rows_at_once = rows_at_once
        self._ops = SCORES.resolve(model.device, model.dtype)

    def score(
        self, hidden: torch.Tensor, token_index: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> Scores:
        """hidden: [tokens of the step, hidden_size] of forward. token_index, token_ids: [n] integers on its device;
        row token_index[i] of hidden is followed by the token token_ids[i]. num_top ≥ 0: likeliest ones of each.

        The scores have the slab's columns.
        """
        count, vocab_size = token_index.shape[0], self._model.spec.vocab_size
        num_top = min(num_top, LOGPROB_COLUMNS - 1, vocab_size)
        scores = Scores.allocate(count, LOGPROB_COLUMNS, hidden.device)
        # All chunks of one size: few shapes of the matrix product are compiled.
        rows = torch.zeros(self._rows_at_once, dtype=token_index.dtype, device=hidden.device)
        for start in range(0, count, self._rows_at_once):
            part = slice(start, min(start + self._rows_at_once, count))
            rows[: part.stop - part.start] = token_index[part]
            logits = self._model.compute_logits(hidden.index_select(0, rows))
            self._ops.score(logits[:, :vocab_size], token_ids[part], num_top, scores.rows(part))
        return scores

    def pick(
        self,
        hidden: torch.Tensor,
        token_index: torch.Tensor,
        starts: Sequence[int],
        device_starts: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Log-probabilities of named tokens, [n] float32.

        hidden: as for score(). token_index: [m], starts, device_starts: [m + 1] (the same numbers, here and on the
        device), token_ids: [n]: token_ids[starts[i] : starts[i + 1]] may follow row token_index[i] of hidden.
        """
        vocab_size, device = self._model.spec.vocab_size, hidden.device
        picks = torch.empty(token_ids.shape[0], dtype=torch.float32, device=device)
        rows = torch.zeros(SCORES_AT_ONCE, dtype=token_index.dtype, device=device)
        places = torch.arange(token_ids.shape[0], dtype=device_starts.dtype, device=device)
        row_of_pick = torch.searchsorted(device_starts[1:], places, right=True)
        for start in range(0, token_index.shape[0], SCORES_AT_ONCE):
            stop = min(start + SCORES_AT_ONCE, token_index.shape[0])
            rows[: stop - start] = token_index[start:stop]
            logits = self._model.compute_logits(hidden.index_select(0, rows))[:, :vocab_size].to(
                torch.float32
            )
            part = slice(starts[start], starts[stop])
            own = row_of_pick[part] - start
            picks[part] = logits[own, token_ids[part].to(torch.int64)] - logits.logsumexp(-1)[own]
        return picks

    def pool(self, hidden: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> torch.Tensor:
        """hidden: as for score(). ranges: [start, end) of tokens. [number of ranges, hidden_size] float32: the sums of
        their hidden states behind the final norm."""
        sums = []
        for start, end in ranges:
            total = torch.zeros(hidden.shape[1], dtype=torch.float32, device=hidden.device)
            for first in range(start, end, POOLED_AT_ONCE):
                rows = hidden[first : min(first + POOLED_AT_ONCE, end)].contiguous()
                total += self._model.normalize(rows).to(torch.float32).sum(0)
            sums.append(total)
        return torch.stack(sums)
