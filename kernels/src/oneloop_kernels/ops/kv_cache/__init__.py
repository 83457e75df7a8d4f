"""Copying blocks of the paged KV cache, and the types it may have. What a layer writes is written by ops.rope.

One layer of the cache is [num_blocks, block_size, 2 · num_kv_heads, head_dim], the keys' heads before the values',
whatever order the storage has: strides are arbitrary, but for head_dim's, which is 1. All layers: the same behind a
leading dimension.

Keys and values have the model's type, or are kept in 8 bits (ops.float8) and widened again before they are multiplied.
Then they may be divided by scales, one for a layer's keys and one for its values (`KvScales`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class KvScales(NamedTuple):
    """What one layer's keys and values are divided by before they are kept in 8 bits; both positive.

    Who reads them makes up for it where it costs nothing: in the factor on the scores, and in the normalised result.
    """

    key: float = 1.0
    value: float = 1.0


UNSCALED: Final = KvScales()
"""As every cache of the model's type is."""


class KvCacheOps(Protocol):
    """What happens to the cache beside a layer's writing and reading."""

    def copy_blocks(
        self,
        cache: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        count: torch.Tensor | None = None,
    ) -> None:
        """Copy whole blocks in every layer.

        cache: [num_layers, num_blocks, block_size, 2 · num_kv_heads, head_dim], each block dense in its storage.
        source, target: [max_copies] int32 or int64 block numbers; no block is both, and none is a target twice.
        count: [1] integer on the device: how many of them are valid, at most max_copies. None: all.
        """


KV_CACHE: Family[KvCacheOps] = Family(
    "kv_cache",
    (
        Implementation("triton", "oneloop_kernels.ops.kv_cache.triton", "TRITON", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.kv_cache.reference", "REFERENCE"),
    ),
)
