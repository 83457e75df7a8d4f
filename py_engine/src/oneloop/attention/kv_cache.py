"""The paged KV cache of all layers, one allocation.

Its shape is [num_layers, num_blocks, block_size, 2 · num_kv_heads, head_dim]; the keys' heads come before the
values' of the same token. Two orders of storage are behind that shape:

* by position, as the shape says: on the CPU a step is one write and a context one gather per layer;
* by head, [num_layers, num_blocks, 2 · num_kv_heads, block_size, head_dim]: a kernel that reads one head of a block
  reads one contiguous piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop_kernels.ops.kv_cache import KV_CACHE, KvScales
from oneloop_kernels.registry import TRITON

if TYPE_CHECKING:
    from oneloop.formats.model_spec import ModelSpec


class PagedKVCache:
    """Storage and block copies; ops.rope writes the steps' keys and values. scales: of each layer, as ops.kv_cache has
    them.

    Blocks hold garbage until they are written; nobody reads them before.
    """

    __slots__ = ("_ops", "block_size", "dtype", "layers", "num_blocks", "scales", "storage")

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        narrow: bool = False,
    ) -> None:
        """dtype: the model's. narrow: keep keys and values in float8_e4m3fn instead (see ops.kv_cache)."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        by_head = KV_CACHE.candidates(device, dtype)[0] == TRITON  # whose kernels take any strides
        inner = (2 * spec.num_kv_heads, block_size) if by_head else (block_size, 2 * spec.num_kv_heads)
        self.dtype = torch.float8_e4m3fn if narrow else dtype
        shape = (spec.num_layers, num_blocks, *inner, spec.head_dim)
        storage = torch.empty(shape, dtype=self.dtype, device=device)
        self.storage = storage.transpose(2, 3) if by_head else storage
        self.layers: tuple[torch.Tensor, ...] = self.storage.unbind(0)
        scales = spec.kv_scales if narrow and spec.kv_scales else ((1.0, 1.0),) * spec.num_layers
        self.scales = tuple(KvScales(*pair) for pair in scales)
        self._ops = KV_CACHE.resolve(device, dtype)

    def copy_blocks(
        self, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor | None = None
    ) -> None:
        """Copy whole blocks in all layers.

        source, target: [max_copies] int32 or int64, no block in both. count: [1] on the device, how many are valid;
        None: all.
        """
        self._ops.copy_blocks(self.storage, source, target, count)
