"""KV cache writes in plain torch."""

from __future__ import annotations

from typing import Final

import torch


class ReferenceKvCacheOps:
    """See the contract."""

    __slots__ = ()

    def write(self, cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """See the contract."""
        cache.flatten(0, 1).index_copy_(0, slots, kv)

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See the contract."""
        for layer in cache:  # layer by layer: the temporary copy stays small
            layer.index_copy_(0, target, layer.index_select(0, source))


REFERENCE: Final = ReferenceKvCacheOps()
