"""Causal attention of a step's rows over the paged KV cache.

A step is planned once, from the rows' lengths and block tables; the plan then runs in every layer. There are two
contracts: PagedAttention plans on the host, from numbers it holds there; DeviceAttention plans in kernels, from fixed
device buffers, so that a captured graph serves steps of any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales
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
    sliding_window: int | None = None
    """A query looks at this many keys at most, its own included; None: at all before it. Device-planned only."""
    soft_cap: float | None = None
    """Scores s become soft_cap · tanh(s / soft_cap), after the scale. Device-planned only."""


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

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *, scales: KvScales = UNSCALED
    ) -> None:
        """Attention of one layer; the cache already holds the keys and values of the whole step.

        qkv: [≥ num_tokens, num_heads + 2 · num_kv_heads, head_dim] contiguous, of which only the queries are read;
        cache: one layer as in `kv_cache`, and scales with which it was written; out: [≥ num_tokens,
        num_heads · head_dim] contiguous, whose first num_tokens rows are written.
        """


class PagedAttention(Protocol):
    """Makes plans."""

    def __call__(self, shape: AttentionShape, rows: AttentionRows, dtype: torch.dtype) -> AttentionPlan:
        """Plan one step. dtype: of the queries; the cache has the same type or 8 bits (ops.kv_cache). The device is
        that of the block tables.
        """


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The device buffers, at fixed addresses, that describe the step; all int32. R: most rows of a step.

    row_slot: [R] the row's slot. seq_lens: [R] the row's context, the step's own tokens included.
    query_start: [R + 1] prefix sums of the rows' queries. Entries from num_rows on are never used.
    num_rows, num_single: [1] how many rows; how many of them, all at the front, have exactly one query.
    block_tables: [slots, width] contiguous rows; entries past a row's context are never used.
    """

    row_slot: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    num_rows: torch.Tensor
    num_single: torch.Tensor
    block_tables: torch.Tensor


class DevicePlan(Protocol):
    """A step planned on the device."""

    def run(
        self, qkv: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        *, scales: KvScales = UNSCALED,
    ) -> None:  # fmt: skip
        """Attention of one layer; as AttentionPlan.run, and capturable in a graph.

        Under programmatic dependent launch the kernel ahead, which writes the step's own queries, keys and values
        (`rope.rotate_and_store`), lets this one begin only after its own wait: what came before it is read at once.

        cache: [num_blocks, block_size, 2 · num_kv_heads, head_dim] with any strides but the last, which is 1.
        sinks: [num_heads] of a float type: logits that take part in each head's softmax and have no value.
        """


class DeviceAttention(Protocol):
    """Plans steps in kernels. It owns the workspaces: one plan at a time is valid, the one made last."""

    def plan(
        self, step: AttentionStep, num_rows: int, num_tokens: int, has_multi: bool, *, may_share: bool = True
    ) -> DevicePlan:
        """Launch the planning of a step; capturable in a graph, for every step that fits.

        num_rows, num_tokens: no step that this plan serves has more. has_multi False: nor a row with several queries.
        may_share: look for neighbouring rows with one query that begin with the same blocks, and read those once for
        all of them; where none are found it costs a small kernel per step and one per layer.
        """


class DeviceAttentionFactory(Protocol):
    """Makes the planner of all layers that have one shape."""

    def __call__(
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
    ) -> DeviceAttention:
        """max_…: of any step. dtype: of queries and output. cache_dtype: of the cache (see ops.kv_cache); None: the
        same. ordered: get ready for plans in the fixed order (oneloop_kernels.order), which have a workspace of their
        own; without, they take longer.
        """


PAGED_ATTENTION: Family[PagedAttention] = Family(
    "paged_attention",
    (Implementation("reference", "oneloop_kernels.ops.paged_attention.reference", "plan"),),
)

DEVICE_ATTENTION: Family[DeviceAttentionFactory] = Family(
    "device_attention",
    (
        Implementation(
            "triton",
            "oneloop_kernels.ops.paged_attention.triton.attention",
            "TritonAttention",
            device_types=frozenset({"cuda"}),
            dtypes=frozenset({"float32", "float16", "bfloat16"}),
        ),
        Implementation(
            "reference", "oneloop_kernels.ops.paged_attention.device_reference", "ReferenceAttention"
        ),
    ),
)
