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

    slots: [num_tokens] int64, where each token's key and value go; −1: a row of padding, which goes nowhere.
    plan: attention over the rows, run per layer.

    A captured graph serves steps of any number of tokens up to its own: there num_tokens is the graph's, and the rows
    that a step does not use have slot −1.
    """

    num_tokens: int
    slots: torch.Tensor
    plan: AttentionPlan
