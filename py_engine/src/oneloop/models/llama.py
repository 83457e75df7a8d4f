"""Llama 2 and 3, SmolLM2, and Mistral without a sliding window: the plain decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.errors import ModelError
from oneloop.models.decoder import Decoder

if TYPE_CHECKING:
    import torch

    from oneloop.formats.model_spec import ModelSpec


class LlamaForCausalLM(Decoder):
    """Biases as the checkpoint says (`attention_bias`, `mlp_bias`); no norm on queries and keys."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        if spec.qk_norm:
            raise ModelError(spec.architecture, "this family has no query and key norm", item="qk_norm")
        super().__init__(spec, dtype=dtype, device=device)
