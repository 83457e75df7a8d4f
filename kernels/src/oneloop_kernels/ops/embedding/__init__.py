"""Rows of the table of token embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oneloop_kernels.registry import Family, Implementation

if TYPE_CHECKING:
    import torch


class Embedding(Protocol):
    """Token id → row of the table."""

    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] int32 or int64; weight: [vocab_size, size], rows contiguous. Returns a new [n, size].

        Ids lie in [0, vocab_size). For one that does not, a CPU raises IndexError and a GPU gives the nearest row: no
        implementation ever reads outside the table.
        """


EMBEDDING: Family[Embedding] = Family(
    "embedding",
    (
        Implementation("triton", "oneloop_kernels.ops.embedding.triton", "embedding", frozenset({"cuda"})),
        Implementation("reference", "oneloop_kernels.ops.embedding.reference", "embedding"),
    ),
)
