"""What a model is to the worker and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from oneloop.attention.kv_cache import PagedKVCache
    from oneloop.attention.metadata import AttentionMetadata
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.quant.base import Target


class Model(Protocol):
    """A language model. Its weights are uninitialised until the loader has filled every target."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def weight_targets(self) -> dict[str, Target]:
        """Hugging Face checkpoint tensor name → the tensor of exactly that shape to copy it into, or who takes it.

        Views of fused parameters. A tied head has no target of its own. Asked for once, by the loader.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """token_ids, positions: [n] integers, n ≥ metadata.num_tokens; rows beyond are padding (any valid id).

        Writes the tokens' keys and values and returns the last layer's hidden states, [n, hidden_size], before the
        final norm: only rows that are sampled need it.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] contiguous rows of forward's result → [n, vocab_size], any strides.

        Normalises them first. The logits have the model's dtype: who needs float32 widens them.
        """

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, hidden_size] contiguous rows of forward's result → the same shape, behind the final norm."""

    def count_experts(self) -> dict[int, torch.Tensor]:
        """Layer with experts → [num_experts] int64 on the device: the tokens that each is sent, from now on.

        To be called before any step, or any graph, that is to be counted.
        """

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Within, forward runs one layer of each kind only: they launch every kernel, and the result is garbage."""
