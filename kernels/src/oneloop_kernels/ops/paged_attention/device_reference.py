"""The device-planned attention in plain torch: row by row, in float32 at least.

It reads the step's numbers on the host when it runs, so it cannot be captured in a graph, and it gathers and widens
every context: made for comparing, and for devices without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales

if TYPE_CHECKING:
    from oneloop_kernels.ops.paged_attention import AttentionShape, AttentionStep


class ReferenceAttention:
    """See the contracts DeviceAttention and DeviceAttentionFactory; it has no workspaces, hence no limits."""

    __slots__ = ("_shape",)

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_rows: int,
        max_tokens: int,
        max_blocks_per_row: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
        ordered: bool = False,
    ) -> None:
        self._shape = shape

    def plan(
        self, step: AttentionStep, num_rows: int, num_tokens: int, has_multi: bool, *, may_share: bool = True
    ) -> ReferenceDevicePlan:
        """See the contract; nothing happens until the plan runs."""
        return ReferenceDevicePlan(self._shape, step)


@dataclass(frozen=True, slots=True)
class ReferenceDevicePlan:
    """See the contract DevicePlan."""

    shape: AttentionShape
    step: AttentionStep

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        *, scales: KvScales = UNSCALED,
    ) -> None:  # fmt: skip
        """See the contract."""
        num_rows = int(self.step.num_rows)
        slots = self.step.row_slot[:num_rows].tolist()
        lengths = self.step.seq_lens[:num_rows].tolist()
        starts = self.step.query_start[: num_rows + 1].tolist()
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            queries = qkv[starts[row] : starts[row + 1], : self.shape.num_heads]
            keys, values = self._context(cache, slot, length).chunk(2, 1)
            attended = self._attend(queries, keys, values, sinks, scales)
            out[starts[row] : starts[row + 1]] = attended.flatten(1).to(out.dtype)

    def _context(self, cache: torch.Tensor, slot: int, length: int) -> torch.Tensor:
        """[length, 2 · num_kv_heads, head_dim]."""
        positions = torch.arange(length, device=cache.device)
        blocks = self.step.block_tables[slot, positions // self.shape.block_size].to(torch.int64)
        return cache[blocks, positions % self.shape.block_size]

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None,
        scales: KvScales,
    ) -> torch.Tensor:  # fmt: skip
        """queries: [n, num_heads, head_dim], the last n of the context; keys, values: [context, num_kv_heads, …]."""
        shape = self.shape
        wide = torch.promote_types(queries.dtype, torch.float32)
        group = shape.num_heads // shape.num_kv_heads
        keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries.to(wide), keys) * (shape.scale * scales.key)
        if shape.soft_cap is not None:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        position = torch.arange(len(keys), device=keys.device)
        own = position[len(keys) - len(queries) :, None]
        hidden = position > own
        if shape.sliding_window is not None:
            hidden |= position <= own - shape.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.to(wide)[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat((scores, column), 2)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values) * scales.value
