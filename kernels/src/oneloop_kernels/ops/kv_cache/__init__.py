"""Writing and copying the paged KV cache.

Layout of one layer: [num_blocks, block_size, 2 · num_kv_heads, head_dim], the keys' heads before the values'. Key and
value of a token lie side by side, so that a step is one write and a row's context one gather per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class KvCacheOps(Protocol):
    """What a step does to the cache beside reading it."""

    def write(self, cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the step's keys and values in one layer.

        cache: one layer; kv: [num_tokens, 2 · num_kv_heads, head_dim]; slots: [num_tokens] int64, distinct, each
        block · block_size + offset.
        """

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks in every layer, all sources read before any target is written.

        cache: [num_layers, num_blocks, block_size, 2 · num_kv_heads, head_dim]; source, target: [num_copies] int64.
        """


KV_CACHE: Family[KvCacheOps] = Family(
    "kv_cache",
    (Implementation("reference", "oneloop_kernels.ops.kv_cache.reference", "REFERENCE"),),
)
