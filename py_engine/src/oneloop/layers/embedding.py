"""The table of token embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from oneloop.quant.base import Target


class Embedding:
    """Row i of the weight belongs to token i; a step looks its rows up together with its angles (layers.rotary)."""

    __slots__ = ("_name", "weight")

    def __init__(
        self, name: str, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """name: checkpoint name prefix."""
        self._name = name
        self.weight = torch.empty(vocab_size, size, dtype=dtype, device=device)

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → the tensor that it fills."""
        return {f"{self._name}.weight": self.weight}
