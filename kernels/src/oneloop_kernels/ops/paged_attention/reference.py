"""Paged attention in plain torch: contexts are gathered from the cache, then torch's own attention runs over them.

Rows with one query are batched, padded to the longest of their group; a group ends where padding would cost more than
another call. The query heads that share a key head stand in for the query positions, so keys are never repeated. Rows
with several queries run one by one. Padding repeats the row's first position: it is always written, hence finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    import numpy.typing as npt

    from oneloop_kernels.ops.paged_attention import AttentionRows, AttentionShape

_GROUP_RATIO = 0.75
"""Contexts shorter than this share of the group's longest may start another group…"""
_GROUP_MIN_SAVING = 512
"""…if so many padded positions are saved: about the cost of one more call per layer."""
_MAX_MASK_ELEMENTS = 1 << 21
"""Queries of a long row are split so that no mask is larger."""


@dataclass(slots=True)
class _SingleGroup:
    """Rows with one query that are attended together."""

    rows: torch.Tensor | None
    """[group] indices of the rows; None: all of them, in order."""
    slots: torch.Tensor
    """[group · longest] cache slots, padded."""
    mask: torch.Tensor | None
    """[group, 1, 1, longest]: 0 or −∞; None: no padding."""
    context: torch.Tensor
    """[group · longest, 2 · num_kv_heads, head_dim]: where a layer's context is gathered."""
    keys: torch.Tensor
    """[group, num_kv_heads, longest, head_dim], a view of context."""
    values: torch.Tensor


@dataclass(slots=True)
class _LongRow:
    """A row with several queries."""

    first: int
    last: int
    """Its queries are [first, last) of the step's."""
    slots: torch.Tensor | None
    """[context] cache slots; None: the row starts its sequence, so the step's own keys are its context."""
    masks: tuple[torch.Tensor, ...]
    """Per slice of queries [slice · queries per key head, context]: 0 or −∞."""


class ReferencePlan:
    """See the contract AttentionPlan."""

    __slots__ = ("_groups", "_long_rows", "_num_single", "_shape")

    def __init__(
        self, shape: AttentionShape, num_single: int, groups: list[_SingleGroup], long_rows: list[_LongRow]
    ) -> None:
        self._shape = shape
        self._num_single = num_single
        self._groups = groups
        self._long_rows = long_rows

    def run(self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """See the contract."""
        flat_cache = cache.flatten(0, 1)
        if self._groups:
            self._run_single(qkv, flat_cache, out)
        for row in self._long_rows:
            self._run_long(row, qkv, flat_cache, out)

    def _run_single(self, qkv: torch.Tensor, flat_cache: torch.Tensor, out: torch.Tensor) -> None:
        shape = self._shape
        grouped = (self._num_single, shape.num_kv_heads, -1, shape.head_dim)
        queries = qkv[: self._num_single, : shape.num_heads].view(grouped)
        target = out[: self._num_single].view(grouped)
        for group in self._groups:
            torch.index_select(flat_cache, 0, group.slots, out=group.context)
            chosen = queries if group.rows is None else queries.index_select(0, group.rows)
            result = F.scaled_dot_product_attention(
                chosen, group.keys, group.values, group.mask, scale=shape.scale
            )
            if group.rows is None:
                target.copy_(result)
            else:
                target.index_copy_(0, group.rows, result)

    def _run_long(
        self, row: _LongRow, qkv: torch.Tensor, flat_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        shape = self._shape
        queries = qkv[row.first : row.last, : shape.num_heads]
        if row.slots is None:
            keys, values = qkv[row.first : row.last, shape.num_heads :].transpose(0, 1).chunk(2)
            result = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                keys[None],
                values[None],
                is_causal=True,
                scale=shape.scale,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )
            out[row.first : row.last].view(queries.shape).copy_(result[0].transpose(0, 1))
            return
        keys, values = flat_cache.index_select(0, row.slots).transpose(0, 1).chunk(2)
        num_shared = shape.num_heads // shape.num_kv_heads
        first = row.first
        for mask in row.masks:
            last = first + mask.shape[0] // num_shared
            grouped = (last - first, shape.num_kv_heads, num_shared, shape.head_dim)
            chosen = qkv[first:last, : shape.num_heads].view(grouped).transpose(0, 1).flatten(1, 2)
            result = F.scaled_dot_product_attention(
                chosen[None], keys[None], values[None], mask, scale=shape.scale
            )
            by_token = result.view(shape.num_kv_heads, last - first, num_shared, shape.head_dim).transpose(
                0, 1
            )
            out[first:last].view(grouped).copy_(by_token)
            first = last


def plan(shape: AttentionShape, rows: AttentionRows, dtype: torch.dtype) -> ReferencePlan:
    """See the contract PagedAttention."""
    num_single = rows.num_single
    contexts = rows.num_scheduled + rows.num_computed
    groups = [
        _plan_group(shape, rows.block_tables, contexts, chosen, num_single, dtype)
        for chosen in _group_by_context(contexts[:num_single])
    ]
    long_rows = []
    first = num_single
    for index in range(num_single, len(contexts)):
        num_queries, num_computed = int(rows.num_scheduled[index]), int(rows.num_computed[index])
        last = first + num_queries
        if num_computed == 0:
            long_rows.append(_LongRow(first, last, None, ()))
        else:
            table = rows.block_tables[index : index + 1]
            slots = _slots(table, num_computed + num_queries, shape.block_size)[0]
            masks = _causal_masks(shape, num_queries, num_computed, dtype, table.device)
            long_rows.append(_LongRow(first, last, slots, masks))
        first = last
    return ReferencePlan(shape, num_single, groups, long_rows)


def _group_by_context(contexts: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    """Split rows into groups of similar context length; each group lists its rows, in order."""
    if len(contexts) == 0:
        return []
    order = np.argsort(-contexts, kind="stable")
    descending = contexts[order]
    bounds = [0]
    while True:
        longest = int(descending[bounds[-1]])
        shorter = bounds[-1] + int(
            np.searchsorted(-descending[bounds[-1] :], -int(longest * _GROUP_RATIO), side="left")
        )
        if shorter >= len(contexts):
            break
        if (longest - int(descending[shorter])) * (len(contexts) - shorter) < _GROUP_MIN_SAVING:
            break
        bounds.append(shorter)
    ends = [*bounds[1:], len(contexts)]
    return [np.sort(order[start:end]) for start, end in zip(bounds, ends, strict=True)]


def _plan_group(
    shape: AttentionShape,
    block_tables: torch.Tensor,
    contexts: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.int64],
    num_single: int,
    dtype: torch.dtype,
) -> _SingleGroup:
    """Gather indices, mask and buffer of the rows `chosen`."""
    device = block_tables.device
    lengths = contexts[chosen]
    longest, count = int(lengths.max()), len(chosen)
    all_rows = count == num_single
    rows = None if all_rows else torch.from_numpy(chosen).to(device)
    tables = block_tables[:num_single] if rows is None else block_tables.index_select(0, rows)
    slots = _slots(tables, longest, shape.block_size)
    mask = None
    if int(lengths.min()) < longest:
        limits = torch.from_numpy(lengths).to(device)
        padding = torch.arange(longest, device=device) >= limits[:, None]
        slots = torch.where(padding, slots[:, :1], slots)
        mask = torch.zeros(count, 1, 1, longest, dtype=dtype, device=device)
        mask.masked_fill_(padding[:, None, None, :], float("-inf"))
    num_kv_heads = shape.num_kv_heads
    context = torch.empty(count * longest, 2 * num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    by_head = context.view(count, longest, 2 * num_kv_heads, shape.head_dim).transpose(1, 2)
    return _SingleGroup(
        rows, slots.reshape(-1), mask, context, by_head[:, :num_kv_heads], by_head[:, num_kv_heads:]
    )


def _slots(tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """[num_rows, length] int64: cache slot of every position."""
    blocks = tables[:, : -(-length // block_size)].to(torch.int64)
    offsets = torch.arange(block_size, device=tables.device)
    return (blocks[:, :, None] * block_size + offsets).flatten(1)[:, :length]


def _causal_masks(
    shape: AttentionShape, num_queries: int, num_computed: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Masks of the row's slices of queries, each query's row repeated for the heads that share a key head."""
    context = num_computed + num_queries
    num_shared = shape.num_heads // shape.num_kv_heads
    per_slice = max(1, _MAX_MASK_ELEMENTS // (context * num_shared))
    positions = torch.arange(context, device=device)
    masks = []
    for start in range(0, num_queries, per_slice):
        limits = positions[num_computed + start : num_computed + min(start + per_slice, num_queries)]
        hidden = (positions > limits[:, None]).repeat_interleave(num_shared, 0)
        masks.append(
            torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        )
    return tuple(masks)
