"""Runs one step: slab in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.worker.prompt_results import PromptResults
from oneloop.worker.rows import RowTable
from oneloop.worker.sampling.sampler import Sampler
from oneloop_kernels.ops.linear import padded_num_tokens
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION, AttentionRows, AttentionShape

if TYPE_CHECKING:
    import numpy.typing as npt

    from oneloop.models.base import Model
    from oneloop.worker.inputs import SlabViews, StepHeader
    from oneloop.worker.memory.ledger import MemoryPlan


class ModelRunner:
    """A model with its KV cache and the state of its slots. One thread at a time; steps in the core's order."""

    __slots__ = ("_attention_shape", "_model", "_plan_attention", "_prompt_results", "_sampler", "kv", "rows")

    def __init__(self, model: Model, plan: MemoryPlan, *, max_num_seqs: int) -> None:
        """Allocates the KV cache. plan: from `memory.plan.plan_memory`."""
        spec = model.spec
        self._model = model
        self.kv = PagedKVCache(
            spec,
            plan.num_blocks,
            plan.block_size,
            dtype=model.dtype,
            device=model.device,
            narrow=plan.narrow_kv,
        )
        max_blocks = (
            -(-plan.max_model_len // plan.block_size) + 1
        )  # + 1: a step ahead may have begun the next
        self.rows = RowTable(max_num_seqs, max_blocks, spec.vocab_size, model.device)
        self._sampler = Sampler(self.rows, model.device)
        self._prompt_results = PromptResults(model)
        self._attention_shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=plan.block_size,
            scale=spec.head_dim**-0.5,
        )
        self._plan_attention = PAGED_ATTENTION.resolve(model.device, model.dtype)

    def execute(self, slab: SlabViews) -> None:
        """Run the step in the slab and write its output part. Its masks, if it has any, are there.

        IndexError for an id, slot or block out of range; the tables may then hold part of the step.
        """
        logits = self.forward(slab)
        if logits is not None:
            self.sample(slab, logits)

    @torch.inference_mode()
    def forward(self, slab: SlabViews) -> torch.Tensor | None:
        """The step up to its logits, [num_samples, vocab_size] float32; None without samples. Errors as `execute`."""
        header = slab.header()
        self.rows.apply(slab, header)
        if header.num_cow:
            self.kv.copy_blocks(
                self._upload(slab.cow_src[: header.num_cow]), self._upload(slab.cow_dst[: header.num_cow])
            )
        if header.num_tokens == 0:
            return None
        hidden = self._forward(slab, header)
        if header.looks_at_hidden:
            self._write_prompt_results(hidden, slab, header)
        if not header.num_samples:
            return None
        return self._logits(hidden, slab.sample_token_index[: header.num_samples])

    @torch.inference_mode()
    def sample(self, slab: SlabViews, logits: torch.Tensor) -> None:
        """Write the output part of the step in the slab. logits: what `forward` gave, overwritten."""
        header = slab.header()
        tokens = self._sampler.sample(logits, slab, header)
        slab.output_token[: header.num_samples] = tokens.cpu().numpy()

    def _forward(self, slab: SlabViews, header: StepHeader) -> torch.Tensor:
        """Final hidden states, [≥ num_tokens, hidden_size]."""
        num_rows, num_tokens = header.num_rows, header.num_tokens
        row_slots = slab.row_slot[:num_rows]
        num_scheduled = slab.row_num_scheduled[:num_rows]
        num_computed = slab.row_num_computed[:num_rows]
        if header.num_single == num_rows:
            token_slots, positions = row_slots, num_computed
        else:
            row_of_token = np.repeat(np.arange(num_rows), num_scheduled)
            token_slots = row_slots[row_of_token]
            first = (num_computed - slab.query_start[:num_rows])[row_of_token]
            positions = first + np.arange(num_tokens, dtype=np.int32)
        num_padded = padded_num_tokens(num_tokens)
        token_index, position_index = self._upload(token_slots), self._upload(positions)
        token_ids = torch.zeros(num_padded, dtype=torch.int64, device=self._model.device)
        given = self._upload(slab.token_ids[:num_tokens])
        token_ids[:num_tokens] = torch.where(given < 0, self.rows.last_token[token_index], given)
        padded_positions = torch.zeros_like(token_ids)
        padded_positions[:num_tokens] = position_index
        metadata = self._attention_metadata(
            header, row_slots, num_scheduled, num_computed, token_index, position_index
        )
        return self._model.forward(token_ids, padded_positions, self.kv, metadata)

    def _attention_metadata(
        self,
        header: StepHeader,
        row_slots: npt.NDArray[np.int32],
        num_scheduled: npt.NDArray[np.int32],
        num_computed: npt.NDArray[np.int32],
        token_slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> AttentionMetadata:
        block_size = self.kv.block_size
        tables = self.rows.block_tables
        blocks = tables[token_slots, positions // block_size].to(torch.int64)
        width = -(-header.max_seq_len // block_size)
        rows = AttentionRows(
            num_scheduled=num_scheduled,
            num_computed=num_computed,
            num_single=header.num_single,
            block_tables=tables[:, :width].index_select(0, self._upload(row_slots)),
        )
        return AttentionMetadata(
            num_tokens=header.num_tokens,
            slots=blocks * block_size + positions % block_size,
            plan=self._plan_attention(self._attention_shape, rows, self._model.dtype),
        )

    def _logits(self, hidden: torch.Tensor, token_index: npt.NDArray[np.int32]) -> torch.Tensor:
        """[num_samples, vocab_size] float32; samples may share a token's hidden state."""
        num_samples = len(token_index)
        padded = np.zeros(padded_num_tokens(num_samples), np.int64)
        padded[:num_samples] = token_index
        chosen = hidden.index_select(0, torch.from_numpy(padded).to(hidden.device))
        return self._model.compute_logits(chosen)[:num_samples].to(torch.float32)

    def _write_prompt_results(self, hidden: torch.Tensor, slab: SlabViews, header: StepHeader) -> None:
        if count := header.num_scores:
            scores = self._prompt_results.score(
                hidden,
                self._upload(slab.score_token_index[:count]),
                self._upload(slab.score_token[:count]),
                header.max_score_logprobs,
            )
            slab.score_rank[:count] = scores.ranks.cpu().numpy()
            slab.score_logprob_token[:count] = scores.token_ids.cpu().numpy()
            slab.score_logprob[:count] = scores.logprobs.cpu().numpy()
        if count := header.num_pools:
            ranges = zip(slab.pool_start[:count].tolist(), slab.pool_end[:count].tolist(), strict=True)
            pooled = self._prompt_results.pool(hidden, ranges)
            slab.pooled[: pooled.numel()] = pooled.flatten().cpu().numpy()
        if count := header.num_picks:
            picks = self._prompt_results.pick(
                hidden,
                self._upload(slab.pick_token_index[: header.num_picked]),
                slab.pick_start[: header.num_picked + 1].tolist(),
                self._upload(slab.pick_start[: header.num_picked + 1]),
                self._upload(slab.pick_token[:count]),
            )
            slab.pick_logprob[:count] = picks.cpu().numpy()

    def _upload(self, values: npt.NDArray[np.int32]) -> torch.Tensor:
        """Host integers as int64 on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self._model.device)
