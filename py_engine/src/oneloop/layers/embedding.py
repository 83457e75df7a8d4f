"""The table of token embeddings."""

from __future__ import annotations

import torch

from oneloop_kernels.ops.embedding import EMBEDDING


class Embedding:
    """Token id → row of the table."""

    __slots__ = ("_compute", "_name", "weight")

    def __init__(
        self, name: str, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """name: checkpoint name prefix."""
        self._name = name
        self.weight = torch.empty(vocab_size, size, dtype=dtype, device=device)
        self._compute = EMBEDDING.resolve(device, dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] int32 or int64 in [0, vocab_size) → new [num_tokens, size]."""
        return self._compute(token_ids, self.weight)

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the tensor that it fills."""
        return {f"{self._name}.weight": self.weight}
