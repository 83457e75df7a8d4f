"""Qwen2 and Qwen2.5 (biases on queries, keys and values) and dense Qwen3 (norms on queries and keys)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.errors import ModelError
from oneloop.models.decoder import Decoder

if TYPE_CHECKING:
    import torch

    from oneloop.formats.model_spec import ModelSpec


class Qwen2ForCausalLM(Decoder):
    """Biases on the query, key and value projections."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        if not spec.qkv_bias:
            raise ModelError(spec.architecture, "this family has biases on q, k and v", item="qkv_bias")
        super().__init__(spec, dtype=dtype, device=device)


class Qwen3ForCausalLM(Decoder):
    """RMS norms over head_dim on queries and keys."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        if not spec.qk_norm:
            raise ModelError(spec.architecture, "this family has query and key norms", item="qk_norm")
        super().__init__(spec, dtype=dtype, device=device)
