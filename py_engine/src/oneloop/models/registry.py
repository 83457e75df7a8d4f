"""Architecture name, as Hugging Face's config.json has it → the class that builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from oneloop.errors import ModelError
from oneloop.models.llama import LlamaForCausalLM
from oneloop.models.moe import MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from oneloop.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

if TYPE_CHECKING:
    import torch

    from oneloop.formats.model_spec import ModelSpec
    from oneloop.models.base import Model


class ModelFactory(Protocol):
    """Builds a model with uninitialised weights."""

    def __call__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> Model: ...


ARCHITECTURES: Final[dict[str, ModelFactory]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen2MoeForCausalLM": Qwen2MoeForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Model:
    """A model of that shape; its weights are uninitialised memory.

    Raises ModelError naming the architecture and the supported ones, or the key that does not fit the family.
    """
    factory = ARCHITECTURES.get(spec.architecture)
    if factory is None:
        raise ModelError(
            spec.architecture,
            f"architecture is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
            item="architectures",
        )
    return factory(spec, dtype=dtype, device=device)
