"""Block copies, and narrowing to the cache's type, in plain torch."""

from __future__ import annotations

from typing import Final

import torch

from oneloop_kernels.ops.float8 import FP8, to_float8
from oneloop_kernels.ops.kv_cache import UNSCALED, KvScales


class ReferenceKvCacheOps:
    """See the contract."""

    __slots__ = ()

    def copy_blocks(
        self,
        cache: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        count: torch.Tensor | None = None,
    ) -> None:
        """See the contract. A count makes the host wait for the device."""
        num_copies = len(source) if count is None else int(count)
        cache = as_copyable(cache)
        source, target = source[:num_copies].to(torch.int64), target[:num_copies].to(torch.int64)
        for layer in cache:  # layer by layer: the temporary copy stays small
            layer.index_copy_(0, target, layer.index_select(0, source))


def narrowed(kv: torch.Tensor, dtype: torch.dtype, scales: KvScales = UNSCALED) -> torch.Tensor:
    """[…, 2 · num_kv_heads, head_dim] as a cache of that type keeps them: of 8 bits, scaled by factors in float32."""
    if dtype is not FP8:
        return kv.to(dtype)
    if scales != UNSCALED:
        keys, values = kv.float().chunk(2, -2)
        kv = torch.cat((keys * (1.0 / scales.key), values * (1.0 / scales.value)), -2)
    return to_float8(kv)


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch's indexing knows on every device."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor


REFERENCE: Final = ReferenceKvCacheOps()
