"""The paged KV cache of all layers: one allocation, [num_layers, num_blocks, block_size, 2 · num_kv_heads, head_dim].

The heads of the keys lie before those of the values of the same token: a step is one write and a context one gather
per layer, where separate tensors would take two of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.kv_cache import KV_CACHE

if TYPE_CHECKING:
    from oneloop.formats.model_spec import ModelSpec


class PagedKVCache:
    """Storage and writing. Blocks hold garbage until they are written; nobody reads them before."""

    __slots__ = ("_ops", "block_size", "layers", "num_blocks", "storage")

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.storage = torch.empty(
            spec.num_layers,
            num_blocks,
            block_size,
            2 * spec.num_kv_heads,
            spec.head_dim,
            dtype=dtype,
            device=device,
        )
        self.layers: tuple[torch.Tensor, ...] = self.storage.unbind(0)
        self._ops = KV_CACHE.resolve(device, dtype)

    def write(self, layer: int, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """kv: [num_tokens, 2 · num_kv_heads, head_dim]; slots: [num_tokens] int64 (block · block_size + offset)."""
        self._ops.write(self.layers[layer], kv, slots)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks in all layers. source, target: [num_copies] int64; sources are read first."""
        self._ops.copy_blocks(self.storage, source, target)


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return spec.num_layers * block_size * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
