"""What the attention of one step needs beside the tensors it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from oneloop_kernels.ops.paged_attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Tensors of the forward pass may have more rows than num_tokens: the rest is padding.

    slots: [num_tokens] int64, where each token's key and value go. plan: attention over the rows, run per layer.
    """

    num_tokens: int
    slots: torch.Tensor
    plan: AttentionPlan
