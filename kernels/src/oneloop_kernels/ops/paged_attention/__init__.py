"""Causal attention of a step's rows over the paged KV cache.

A step is planned once, from the rows' lengths and block tables; the plan then runs in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one attention layer, and the factor on the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Which rows a step holds.

    num_scheduled, num_computed: [num_rows] on the host; row i has num_scheduled[i] ≥ 1 queries, which follow
    num_computed[i] tokens of its context. Queries lie one row after the other.
    num_single: how many rows, all at the front, have exactly one query.
    block_tables: [num_rows, ≥ blocks of the longest context] integers on the device.
    """

    num_scheduled: npt.NDArray[np.int32]
    num_computed: npt.NDArray[np.int32]
    num_single: int
    block_tables: torch.Tensor


class AttentionPlan(Protocol):
    """A planned step."""

    def run(self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of one layer; the cache already holds the keys and values of the whole step.

        qkv: [≥ num_tokens, num_heads + 2 · num_kv_heads, head_dim] contiguous, rotated; cache: one layer as in
        `kv_cache`; out: [≥ num_tokens, num_heads · head_dim] contiguous, whose first num_tokens rows are written.
        """


class PagedAttention(Protocol):
    """Makes plans."""

    def __call__(self, shape: AttentionShape, rows: AttentionRows, dtype: torch.dtype) -> AttentionPlan:
        """Plan one step. dtype: of queries and cache; the device is that of the block tables."""


PAGED_ATTENTION: Family[PagedAttention] = Family(
    "paged_attention",
    (Implementation("reference", "oneloop_kernels.ops.paged_attention.reference", "plan"),),
)
