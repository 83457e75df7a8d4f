"""The attention block of a decoder layer: projections, rotation, cache write, attention, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.layers.linear import Linear
from oneloop.layers.norm import RMSNorm
from oneloop_kernels.ops.rope import ROPE

if TYPE_CHECKING:
    from oneloop.attention.kv_cache import PagedKVCache
    from oneloop.attention.metadata import AttentionMetadata
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.layers.rotary import RotaryStep


class AttentionBlock:
    """Causal self-attention with grouped key heads. Queries, keys and values come from one weight."""

    __slots__ = (
        "_head_dim",
        "_index",
        "_num_heads",
        "_num_rotated",
        "_rotate",
        "key_norm",
        "output",
        "qkv",
        "query_norm",
    )

    def __init__(
        self, name: str, index: int, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """name: checkpoint name prefix. index: the layer, for the cache."""
        head_dim = spec.head_dim
        self._index = index
        self._head_dim = head_dim
        self._num_heads = spec.num_heads
        self._num_rotated = spec.num_heads + spec.num_kv_heads
        parts = {
            f"{name}.q_proj": spec.num_heads * head_dim,
            f"{name}.k_proj": spec.num_kv_heads * head_dim,
            f"{name}.v_proj": spec.num_kv_heads * head_dim,
        }
        self.qkv = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(
            spec.num_heads * head_dim,
            {f"{name}.o_proj": spec.hidden_size},
            bias=spec.output_bias,
            dtype=dtype,
            device=device,
        )
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if spec.qk_norm:
            eps = spec.rms_norm_eps
            self.query_norm = RMSNorm(f"{name}.q_norm", head_dim, eps, dtype=dtype, device=device)
            self.key_norm = RMSNorm(f"{name}.k_norm", head_dim, eps, dtype=dtype, device=device)
        self._rotate = ROPE.resolve(device, dtype)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: RotaryStep,
        kv: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        norm: RMSNorm,
    ) -> None:
        """x += attention(norm(x)), in place; rows of padding get garbage. x: [≥ num_tokens, hidden_size] contiguous."""
        num_heads, num_tokens = self._num_heads, metadata.num_tokens
        qkv = self.qkv(x, norm=norm).contiguous().view(x.shape[0], -1, self._head_dim)
        rotated = qkv[:, : self._num_rotated]
        if self.query_norm is not None and self.key_norm is not None:
            rotated[:, :num_heads] = self.query_norm(rotated[:, :num_heads])
            rotated[:, num_heads:] = self.key_norm(rotated[:, num_heads:])
        self._rotate(rotated, rotary.cos, rotary.sin)
        kv.write(self._index, qkv[:num_tokens, num_heads:], metadata.slots)
        attended = torch.empty(x.shape[0], num_heads * self._head_dim, dtype=x.dtype, device=x.device)
        metadata.plan.run(qkv, kv.layers[self._index], attended)
        self.output(attended, residual=x)

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name → the view that it fills."""
        targets = self.qkv.weight_targets() | self.output.weight_targets()
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                targets |= norm.weight_targets()
        return targets
