"""Mixtral, Qwen2-MoE (Qwen1.5-MoE too) and Qwen3-MoE: decoders some or all of whose layers have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.errors import ModelError
from oneloop.models.llama import LlamaForCausalLM
from oneloop.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

if TYPE_CHECKING:
    import torch

    from oneloop.formats.model_spec import ModelSpec


class MixtralForCausalLM(LlamaForCausalLM):
    """Every layer has experts, and none is shared."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        if spec.moe is None or not all(map(spec.moe.is_sparse, range(spec.num_layers))):
            raise ModelError(
                spec.architecture, "this family has experts in every layer", item="num_local_experts"
            )
        _refuse_shared(spec)
        super().__init__(spec, dtype=dtype, device=device)


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Sparse layers have a shared expert with a gate of its own."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        if spec.moe is not None and not (spec.moe.shared_gate and spec.moe.shared_intermediate_size):
            raise ModelError(
                spec.architecture, "this family has a shared expert", item="shared_expert_intermediate_size"
            )
        super().__init__(spec, dtype=dtype, device=device)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """No expert is shared."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for switches that no model of this family has."""
        _refuse_shared(spec)
        super().__init__(spec, dtype=dtype, device=device)


def _refuse_shared(spec: ModelSpec) -> None:
    if spec.moe is not None and spec.moe.shared_intermediate_size:
        raise ModelError(
            spec.architecture, "this family has no shared expert", item="shared_expert_intermediate_size"
        )
