"""Paged attention in plain torch: contexts are gathered from the cache, then torch's own attention runs over them.

Rows with one query are batched by length, padded to the longest of their group; a group ends where padding would cost
more than another call, or where its contexts would leave the processor's cache. The query heads that share a key head
stand in for the query positions, so keys are never repeated. Rows with several queries run one by one. Padding repeats
the row's first position: it is always written, hence finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales

if TYPE_CHECKING:
    import numpy.typing as npt

    from oneloop_kernels.ops.paged_attention import AttentionRows, AttentionShape

_GROUP_RATIO = 0.75
"""Contexts shorter than this share of the group's longest may start another group…"""
_GROUP_MIN_SAVING = 512
"""…if so many padded positions are saved: about the cost of one more call per layer."""
_GROUP_MAX_BYTES = 2 << 20
"""Of gathered keys and values; a single row may be larger."""


@dataclass(slots=True)
class _SingleGroup:
    """Rows with one query that are attended together: [first, last) in the order of the plan."""

    first: int
    last: int
    slots: torch.Tensor
    """[group · longest] cache slots, padded."""
    mask: torch.Tensor | None
    """[group, 1, 1, longest]: 0 or −∞; None: no padding."""
    context: torch.Tensor
    """[group · longest, 2 · num_kv_heads, head_dim]: where a layer's context is gathered; groups share the memory."""
    keys: torch.Tensor
    """[group, num_kv_heads, longest, head_dim], a view of context."""
    values: torch.Tensor


@dataclass(slots=True)
class _LongRow:
    """A row with several queries."""

    first: int
    last: int
    """Its queries are [first, last) of the step's."""
    slots: torch.Tensor
    """[context] cache slots."""
    mask: torch.Tensor | None
    """[queries, context]: 0 or −∞, for keys in the order of slots; None: the plain causal one."""


class ReferencePlan:
    """See the contract AttentionPlan."""

    __slots__ = ("_groups", "_long_rows", "_num_single", "_order", "_shape")

    def __init__(
        self,
        shape: AttentionShape,
        num_single: int,
        order: torch.Tensor | None,
        groups: list[_SingleGroup],
        long_rows: list[_LongRow],
    ) -> None:
        """order: [num_single] int64, the rows with one query as the groups have them; None: as the step has them."""
        self._shape = shape
        self._num_single = num_single
        self._order = order
        self._groups = groups
        self._long_rows = long_rows

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *, scales: KvScales = UNSCALED
    ) -> None:
        """See the contract."""
        flat_cache = cache.flatten(0, 1)
        factor = self._shape.scale * scales.key
        if self._groups:
            self._run_single(qkv, flat_cache, out, factor)
        for row in self._long_rows:
            self._run_long(row, qkv, flat_cache, out, factor)
        if scales.value != 1.0:
            out[: self._long_rows[-1].last if self._long_rows else self._num_single] *= scales.value

    def _run_single(
        self, qkv: torch.Tensor, flat_cache: torch.Tensor, out: torch.Tensor, factor: float
    ) -> None:
        shape = self._shape
        grouped = (self._num_single, shape.num_kv_heads, -1, shape.head_dim)
        queries = qkv[: self._num_single, : shape.num_heads].view(grouped)
        target = out[: self._num_single].view(grouped)
        if self._order is not None:
            queries = queries.index_select(0, self._order)
        results = []
        for group in self._groups:
            if flat_cache.dtype == group.context.dtype:
                torch.index_select(flat_cache, 0, group.slots, out=group.context)
            else:
                group.context.copy_(flat_cache.index_select(0, group.slots))
            results.append(
                F.scaled_dot_product_attention(
                    queries[group.first : group.last], group.keys, group.values, group.mask, scale=factor
                )
            )
        result = results[0] if len(results) == 1 else torch.cat(results)
        if self._order is None:
            target.copy_(result)
        else:
            target.index_copy_(0, self._order, result)

    def _run_long(
        self, row: _LongRow, qkv: torch.Tensor, flat_cache: torch.Tensor, out: torch.Tensor, factor: float
    ) -> None:
        shape = self._shape
        kv = flat_cache.index_select(0, row.slots).to(qkv.dtype)
        grouped = (row.last - row.first, shape.num_kv_heads, -1, shape.head_dim)
        queries = qkv[row.first : row.last, : shape.num_heads].view(grouped).permute(1, 2, 0, 3)
        # The heads that share a key head are a dimension in which keys and values do not advance.
        keys, values = kv.transpose(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1).chunk(2)
        result = F.scaled_dot_product_attention(
            queries, keys, values, row.mask, is_causal=row.mask is None, scale=factor
        )
        out[row.first : row.last].view(grouped).copy_(result.permute(2, 0, 1, 3))


def plan(shape: AttentionShape, rows: AttentionRows, dtype: torch.dtype) -> ReferencePlan:
    """See the contract PagedAttention."""
    num_single = rows.num_single
    contexts = rows.num_scheduled + rows.num_computed
    order, groups = _plan_single(shape, rows.block_tables[:num_single], contexts[:num_single], dtype)
    long_rows = []
    first = num_single
    for index in range(num_single, len(contexts)):
        num_queries, num_computed = int(rows.num_scheduled[index]), int(rows.num_computed[index])
        last = first + num_queries
        table = rows.block_tables[index : index + 1]
        slots = _slots(table, num_computed + num_queries, shape.block_size)[0]
        mask = None
        if num_computed > 0:
            slots = slots.flip(0)
            mask = _reversed_causal_mask(num_queries, len(slots), dtype, table.device)
        long_rows.append(_LongRow(first, last, slots, mask))
        first = last
    return ReferencePlan(shape, num_single, order, groups, long_rows)


def _plan_single(
    shape: AttentionShape, block_tables: torch.Tensor, contexts: npt.NDArray[np.int32], dtype: torch.dtype
) -> tuple[torch.Tensor | None, list[_SingleGroup]]:
    """Order and groups of the rows with one query. block_tables, contexts: of those rows alone."""
    if len(contexts) == 0:
        return None, []
    device = block_tables.device
    position_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    descending = np.argsort(-contexts, kind="stable")
    bounds = _group_bounds(contexts[descending], max(1, _GROUP_MAX_BYTES // position_bytes))
    order = None
    if len(bounds) > 2:
        order = torch.from_numpy(descending).to(device)
        contexts, block_tables = contexts[descending], block_tables.index_select(0, order)
    largest = max((last - first) * int(contexts[first:last].max()) for first, last in pairwise(bounds))
    buffer = torch.empty(largest, 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    groups = [
        _plan_group(shape, block_tables[first:last], contexts[first:last], first, buffer)
        for first, last in pairwise(bounds)
    ]
    return order, groups


def _group_bounds(descending: npt.NDArray[np.int32], max_positions: int) -> list[int]:
    """Cut rows, longest context first, into groups [bounds[i], bounds[i + 1]) of at most max_positions, padded."""
    bounds = [0]
    while bounds[-1] < len(descending):
        first = bounds[-1]
        longest = int(descending[first])
        last = min(len(descending), first + max(1, max_positions // longest))
        shorter = first + int(np.searchsorted(-descending[first:last], -int(longest * _GROUP_RATIO)))
        if shorter < last and (longest - int(descending[shorter])) * (last - shorter) >= _GROUP_MIN_SAVING:
            last = shorter
        bounds.append(last)
    return bounds


def _plan_group(
    shape: AttentionShape,
    tables: torch.Tensor,
    contexts: npt.NDArray[np.int32],
    first: int,
    buffer: torch.Tensor,
) -> _SingleGroup:
    """Gather indices, mask and views on the buffer. tables, contexts: of the group's rows."""
    device = tables.device
    longest, count = int(contexts.max()), len(contexts)
    slots = _slots(tables, longest, shape.block_size)
    mask = None
    if int(contexts.min()) < longest:
        limits = torch.from_numpy(contexts).to(device)
        padding = torch.arange(longest, device=device) >= limits[:, None]
        slots = torch.where(padding, slots[:, :1], slots)
        mask = torch.zeros(count, 1, 1, longest, dtype=buffer.dtype, device=device)
        mask.masked_fill_(padding[:, None, None, :], float("-inf"))
    context = buffer[: count * longest]
    by_head = context.view(count, longest, 2 * shape.num_kv_heads, shape.head_dim).transpose(1, 2)
    keys, values = by_head.chunk(2, 1)
    return _SingleGroup(first, first + count, slots.reshape(-1), mask, context, keys, values)


def _slots(tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """[num_rows, length] int64: cache slot of every position."""
    blocks = tables[:, : -(-length // block_size)].to(torch.int64)
    offsets = torch.arange(block_size, device=tables.device)
    return (blocks[:, :, None] * block_size + offsets).flatten(1)[:, :length]


def _reversed_causal_mask(
    num_queries: int, context: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_queries, context]: 0 where query i may look at the key j-th from the end, −∞ where it comes later.

    That is i + j ≥ num_queries − 1, a function of i + j: a view whose rows overlap, of one line of numbers.
    """
    line = torch.zeros(num_queries + context - 1, dtype=dtype, device=device)
    line[: num_queries - 1] = float("-inf")
    return line.as_strided((num_queries, context), (1, 1))
