"""The attention block of a decoder layer: projections, rotation, cache write, attention, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.layers.linear import Linear
from oneloop_kernels.ops.rope import ROPE, HeadNorms

if TYPE_CHECKING:
    from oneloop.attention.kv_cache import PagedKVCache
    from oneloop.attention.metadata import AttentionMetadata
    from oneloop.formats.model_spec import ModelSpec
    from oneloop.layers.norm import RMSNorm
    from oneloop.layers.rotary import RotaryStep
    from oneloop.quant.base import Target


class AttentionBlock:
    """Causal self-attention with grouped key heads. Queries, keys and values come from one weight."""

    __slots__ = (
        "_head_dim",
        "_index",
        "_name",
        "_norms",
        "_num_heads",
        "_ops",
        "output",
        "qkv",
    )

    def __init__(
        self, name: str, index: int, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """name: checkpoint name prefix. index: the layer, for the cache."""
        head_dim = spec.head_dim
        self._index = index
        self._head_dim = head_dim
        self._num_heads = spec.num_heads
        self._name = name
        parts = {
            f"{name}.q_proj": spec.num_heads * head_dim,
            f"{name}.k_proj": spec.num_kv_heads * head_dim,
            f"{name}.v_proj": spec.num_kv_heads * head_dim,
        }
        self.qkv = Linear(
            spec.hidden_size,
            parts,
            bias=spec.qkv_bias,
            dtype=dtype,
            device=device,
            quantization=spec.quantization,
        )
        self.output = Linear(
            spec.num_heads * head_dim,
            {f"{name}.o_proj": spec.hidden_size},
            bias=spec.output_bias,
            dtype=dtype,
            device=device,
            quantization=spec.quantization,
        )
        self._norms: HeadNorms | None = None
        if spec.qk_norm:
            weight = torch.empty(2, head_dim, dtype=dtype, device=device)
            self._norms = HeadNorms(weight, spec.rms_norm_eps)
        self._ops = ROPE.resolve(device, dtype)

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
        cache = kv.layers[self._index]
        around = (rotary, self._norms, cache, metadata.slots)
        call = self.qkv.joint_call(x, norm=norm)
        qkv = None if call is None else self._ops.project_and_store(call, *around)
        if qkv is None:
            qkv = self.qkv(x, norm=norm).contiguous().view(x.shape[0], -1, self._head_dim)
            self._ops.rotate_and_store(qkv, *around)
        attended = torch.empty(x.shape[0], self._num_heads * self._head_dim, dtype=x.dtype, device=x.device)
        metadata.plan.run(qkv, cache, attended)
        self.output(attended, residual=x)

    def weight_targets(self) -> dict[str, Target]:
        """Checkpoint tensor name → where it goes."""
        targets: dict[str, Target] = self.qkv.weight_targets() | self.output.weight_targets()
        if self._norms is not None:
            for part, weight in zip(("q_norm", "k_norm"), self._norms.weight, strict=True):
                targets[f"{self._name}.{part}.weight"] = weight
        return targets
