"""Block copies, and narrowing to the cache's type, in plain torch."""

from __future__ import annotations

from typing import Final

import torch

from oneloop_kernels.ops.float8 import FP8, to_float8


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


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a cache of that type keeps them."""
    return to_float8(values) if dtype is FP8 else values.to(dtype)


def as_copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch's indexing knows on every device."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor


REFERENCE: Final = ReferenceKvCacheOps()
