"""The pre-norm decoder that the Llama and Qwen families share; ModelSpec's switches tell them apart."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from oneloop.attention.block import AttentionBlock
from oneloop.layers.embedding import Embedding
from oneloop.layers.linear import Linear
from oneloop.layers.mlp import GatedMLP
from oneloop.layers.moe import SparseMLP
from oneloop.layers.norm import RMSNorm
from oneloop.layers.rotary import Rotary, RotaryStep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oneloop.attention.kv_cache import PagedKVCache
    from oneloop.attention.metadata import AttentionMetadata
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.quant.base import Target


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), in place on x. sparse: instead of mlp, where there are experts."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm", "sparse")

    def __init__(self, index: int, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        name = f"model.layers.{index}"
        eps = spec.rms_norm_eps
        self.attention_norm = RMSNorm(
            f"{name}.input_layernorm", spec.hidden_size, eps, dtype=dtype, device=device
        )
        self.attention = AttentionBlock(f"{name}.self_attn", index, spec, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(
            f"{name}.post_attention_layernorm", spec.hidden_size, eps, dtype=dtype, device=device
        )
        self.mlp: GatedMLP | None = None
        self.sparse: SparseMLP | None = None
        if spec.moe is not None and spec.moe.is_sparse(index):
            self.sparse = SparseMLP(
                name, spec.moe, spec.hidden_size, dtype=dtype, device=device, quantization=spec.quantization
            )
        else:
            self.mlp = GatedMLP(
                f"{name}.mlp",
                spec.hidden_size,
                spec.intermediate_size,
                bias=spec.mlp_bias,
                dtype=dtype,
                device=device,
                quantization=spec.quantization,
            )

    def __call__(
        self, x: torch.Tensor, rotary: RotaryStep, kv: PagedKVCache, metadata: AttentionMetadata
    ) -> None:
        """x: [n, hidden_size] contiguous, updated in place."""
        self.attention(x, rotary, kv, metadata, norm=self.attention_norm)
        if self.sparse is not None:
            self.sparse(x, norm=self.mlp_norm, slots=metadata.slots)
        elif self.mlp is not None:
            self.mlp(x, norm=self.mlp_norm)

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where it goes."""
        parts = (self.attention_norm, self.attention, self.mlp_norm, self.mlp, self.sparse)
        return {
            name: target
            for part in parts
            if part is not None
            for name, target in part.weight_targets().items()
        }


class Decoder:
    """See models.base.Model."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding(
            "model.embed_tokens", spec.vocab_size, spec.hidden_size, dtype=dtype, device=device
        )
        self.rotary = Rotary(spec, dtype=dtype, device=device)
        self.layers = tuple(DecoderLayer(i, spec, dtype=dtype, device=device) for i in range(spec.num_layers))
        self.norm = RMSNorm("model.norm", spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)
        tied = self.embedding.weight if spec.tie_word_embeddings else None
        self.head = Linear(
            spec.hidden_size,
            {"lm_head": spec.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            quantization=spec.quantization,
            weight=tied,
        )

    def weight_targets(self) -> dict[str, Target]:
        """See Model."""
        targets = self.embedding.weight_targets() | self.norm.weight_targets()
        for layer in self.layers:
            targets |= layer.weight_targets()
        if not self.spec.tie_word_embeddings:
            targets |= self.head.weight_targets()
        return targets

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See Model."""
        rotary, hidden = self.rotary.with_embedding(positions, token_ids, self.embedding.weight)
        for layer in self.layers:
            layer(hidden, rotary, kv, metadata)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.head(hidden, norm=self.norm)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return self.norm(hidden)

    def count_experts(self) -> dict[int, torch.Tensor]:
        """See Model."""
        counts = {}
        for index, layer in enumerate(self.layers):
            if layer.sparse is not None:
                counts[index] = layer.sparse.count_tokens()
        return counts

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """See Model. A layer is dense or sparse, and then its experts' weights are kept in some way."""
        layers = self.layers
        kinds = {None if layer.sparse is None else layer.sparse.kinds: layer for layer in reversed(layers)}
        self.layers = tuple(kinds.values())
        try:
            yield
        finally:
            self.layers = layers
