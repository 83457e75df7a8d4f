"""Block copies in plain torch."""

from __future__ import annotations

from typing import Final

import torch


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
        source, target = source[:num_copies].to(torch.int64), target[:num_copies].to(torch.int64)
        for layer in cache:  # layer by layer: the temporary copy stays small
            layer.index_copy_(0, target, layer.index_select(0, source))


REFERENCE: Final = ReferenceKvCacheOps()
