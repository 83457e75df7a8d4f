"""Logits of a step → tokens and log-probabilities.

Order, as vLLM's users know it: raw log-probabilities are taken first; then masks, min_tokens bans, logit_bias,
penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p, the draw. Each stage touches only rows
that ask for it, and a step whose samples are all plain greedy is one argmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from oneloop.worker.inputs import LOGPROB_COLUMNS, StepFlag
from oneloop.worker.sampling.contenders import Contenders
from oneloop.worker.sampling.masks import sort_masks
from oneloop_kernels.ops.sampling import SAMPLING, Draws, Penalties, Truncation

if TYPE_CHECKING:
    import numpy.typing as npt

    from oneloop.worker.inputs import SlabViews, StepHeader
    from oneloop.worker.rows import RowTable
    from oneloop.worker.sampling.masks import Candidates
    from oneloop.worker.sampling.slot_lists import Entries


class Sampler:
    """Samples the rows of a step from its slab's columns and the state of their slots."""

    __slots__ = ("_device", "_ops", "_rows")

    def __init__(self, rows: RowTable, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._ops = SAMPLING.resolve(device, torch.float32)

    def sample(self, logits: torch.Tensor, slab: SlabViews, header: StepHeader) -> torch.Tensor:
        """logits: [num_samples, vocab_size] float32 of the step's samples, overwritten. Returns [num_samples] int64.

        −1 stands for a row whose logits hold NaN or +∞: the core ends its sequence. Writes log-probabilities into the
        slab where rows ask for them, and remembers the tokens for their slots.
        """
        slots = slab.sample_slot[: header.num_samples]
        device_slots = self._upload(slots.astype(np.int64))
        if header.flags == 0 and not header.num_masked:
            tokens = self._ops.likeliest(logits)
        else:
            tokens = self._sample_with_options(logits, slab, header, slots)
        # Any id will do for a row without one: the step that may be in flight already computes with it.
        self._rows.last_token.index_copy_(0, device_slots, tokens.clamp(min=0))
        return tokens

    def _sample_with_options(
        self,
        logits: torch.Tensor,
        slab: SlabViews,
        header: StepHeader,
        slots: npt.NDArray[np.int32],
    ) -> torch.Tensor:
        rows, columns, flags = self._rows, self._rows.columns, header.flags
        output_index = slab.sample_output_index[: header.num_samples]
        asked = _members(columns.num_logprobs[slots] >= 0, flags & StepFlag.LOGPROBS)
        raw = logits.index_select(0, self._upload(asked)) if len(asked) else None
        few = self._mask(logits, slab, header.num_samples) if header.num_masked else []
        if flags & StepFlag.MIN_TOKENS:
            self._add(logits, rows.banned.select(slots, output_index < columns.min_tokens[slots]))
        if flags & StepFlag.BIAS:
            self._add(logits, rows.bias.select(slots))
        penalized = _members(columns.uses_penalties[slots], flags & StepFlag.PENALTIES)
        if len(penalized):
            self._penalize(logits, penalized, slots[penalized])
        tokens = self._choose(logits, few, slots, output_index)
        token_ids = tokens.clamp(min=0)
        if len(penalized):
            chosen = token_ids.index_select(0, self._upload(penalized))
            rows.history.append(self._upload(slots[penalized].astype(np.int64)), chosen)
        if raw is not None:
            self._write_logprobs(raw, asked, token_ids, slab, header.max_logprobs)
        return tokens

    def _mask(self, logits: torch.Tensor, slab: SlabViews, num_samples: int) -> list[Candidates]:
        """−∞ for tokens that must not come, but for samples that are returned with the few that may."""
        rows = slab.sample_mask_row[:num_samples]
        samples = np.flatnonzero(rows >= 0)
        if not len(samples):
            return []
        masks = sort_masks(samples, slab.mask_word[rows[samples]], logits.shape[1])
        if len(masks.banned[0]):
            logits[self._upload(masks.banned[0]), self._upload(masks.banned[1])] = -torch.inf
        if len(masks.masked):
            index = self._upload(masks.masked)
            masked = logits.index_select(0, index)
            self._ops.mask(masked, self._upload(masks.words.view(np.int32)))
            logits.index_copy_(0, index, masked)
        return masks.few

    def _penalize(
        self, logits: torch.Tensor, samples: npt.NDArray[np.int64], slots: npt.NDArray[np.int32]
    ) -> None:
        columns = self._rows.columns
        in_prompt, output_counts = self._rows.history.rows(self._upload(slots.astype(np.int64)))
        index = self._upload(samples)
        chosen = logits.index_select(0, index)
        penalties = Penalties(
            repetition=self._upload(columns.repetition_penalty[slots]),
            presence=self._upload(columns.presence_penalty[slots]),
            frequency=self._upload(columns.frequency_penalty[slots]),
            in_prompt=in_prompt,
            output_counts=output_counts,
        )
        self._ops.penalize(chosen, penalties)
        logits.index_copy_(0, index, chosen)

    def _choose(
        self,
        logits: torch.Tensor,
        few: list[Candidates],
        slots: npt.NDArray[np.int32],
        output_index: npt.NDArray[np.int32],
    ) -> torch.Tensor:
        """[num_samples] tokens. few: samples that may get nothing else."""
        if not few:
            return self._choose_from(Contenders(logits), slots, output_index)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        others = np.delete(np.arange(len(slots)), np.concatenate([group.samples for group in few]))
        chosen_from = [(group.samples, self._among(logits, group)) for group in few]
        if len(others):
            chosen_from.append((others, Contenders(logits).rows(self._upload(others))))
        for samples, contenders in chosen_from:
            chosen = self._choose_from(contenders, slots[samples], output_index[samples])
            tokens[self._upload(samples)] = chosen
        return tokens

    def _among(self, logits: torch.Tensor, group: Candidates) -> Contenders:
        token_ids = self._upload(group.token_ids)
        among = logits[self._upload(group.samples)[:, None], token_ids]
        among.masked_fill_(self._upload(~group.is_token), -torch.inf)
        return Contenders(among, token_ids)

    def _choose_from(
        self,
        contenders: Contenders,
        slots: npt.NDArray[np.int32],
        output_index: npt.NDArray[np.int32],
    ) -> torch.Tensor:
        """[n] tokens. Greedy rows, rows drawn from all and rows drawn from the likeliest: each group at once."""
        columns = self._rows.columns
        random = columns.temperature[slots] > 0
        truncated = random & ((columns.top_k[slots] > 0) | (columns.top_p[slots] < 1.0))
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for members in (~random, random & ~truncated, truncated):
            rows = np.flatnonzero(members)
            if not len(rows):
                continue
            index = self._upload(rows)
            group = contenders.rows(index)
            if not random[rows[0]]:
                tokens[index] = group.likeliest(self._ops)
                continue
            draws = self._draws(slots[rows], output_index[rows], bool(truncated[rows[0]]))
            tokens[index] = group.draw(self._ops, draws)
        return tokens

    def _draws(
        self, slots: npt.NDArray[np.int32], output_index: npt.NDArray[np.int32], truncates: bool
    ) -> Draws:
        columns = self._rows.columns
        min_p, top_k, top_p = columns.min_p[slots], columns.top_k[slots], columns.top_p[slots]
        truncation = None
        if truncates:
            truncation = Truncation(
                top_k=self._upload(top_k.astype(np.int64)),
                top_p=self._upload(top_p),
                max_top_k=int(top_k.max()),
                all_top_k=bool((top_k > 0).all()),
            )
        return Draws(
            temperature=self._upload(columns.temperature[slots]),
            seed=self._upload(columns.seed[slots]),
            output_index=self._upload(output_index.astype(np.int64)),
            min_p=self._upload(min_p) if (min_p > 0).any() else None,
            truncation=truncation,
        )

    def _write_logprobs(
        self,
        raw: torch.Tensor,
        samples: npt.NDArray[np.int64],
        tokens: torch.Tensor,
        slab: SlabViews,
        max_logprobs: int,
    ) -> None:
        num_top = min(max_logprobs, LOGPROB_COLUMNS - 1, raw.shape[1])
        top = self._ops.top_logprobs(raw, tokens.index_select(0, self._upload(samples)), num_top)
        slab.output_rank[samples] = top.ranks.cpu().numpy()
        slab.output_logprob_token[samples, : num_top + 1] = top.token_ids.cpu().numpy()
        slab.output_logprob[samples, : num_top + 1] = top.logprobs.cpu().numpy()

    def _add(self, logits: torch.Tensor, entries: Entries) -> None:
        if len(entries.samples):
            where = (self._upload(entries.samples), self._upload(entries.tokens))
            logits.index_put_(where, self._upload(entries.values), accumulate=True)

    def _upload(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device; on the CPU the same memory."""
        return torch.from_numpy(values).to(self._device)


def _members(wanted: npt.NDArray[np.bool_], flag: int) -> npt.NDArray[np.int64]:
    """Indices of the samples that want something; none where the step's flag says so."""
    return np.flatnonzero(wanted) if flag else np.empty(0, np.int64)
