"""The experts of a Hugging Face config.json → MoeSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.formats.model_spec import MoeSpec

if TYPE_CHECKING:
    from oneloop.formats.json_values import JsonValues

_MAX_EXPERTS = 4096
_MAX_WIDTH = 1 << 20


def hf_moe_spec(config: JsonValues, architecture: str, num_layers: int) -> MoeSpec | None:
    """None for architectures without experts. ModelError names the key that is missing, impossible or not supported.

    Defaults are those of transformers' config classes.
    """
    match architecture:
        case "MixtralForCausalLM":
            return _mixtral(config)
        case "Qwen2MoeForCausalLM":
            return _qwen(config, num_layers, experts=60, top_k=4, width=1408, shared_width=5632)
        case "Qwen3MoeForCausalLM":
            return _qwen(config, num_layers, experts=128, top_k=8, width=768, shared_width=0)
    return None


def _mixtral(config: JsonValues) -> MoeSpec:
    num_experts = _num_experts(config, 8)
    return MoeSpec(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", 1, num_experts, default=2),
        intermediate_size=config.integer("intermediate_size", 1, _MAX_WIDTH),
        renormalised=True,
        layout="mixtral",
    )


def _qwen(
    config: JsonValues, num_layers: int, *, experts: int, top_k: int, width: int, shared_width: int
) -> MoeSpec | None:
    """shared_width: of the shared expert by default; 0 for a family that has none."""
    if config.raw("num_experts") == 0:
        return None
    num_experts = _num_experts(config, experts)
    shared = 0
    if shared_width:
        shared = config.integer("shared_expert_intermediate_size", 1, _MAX_WIDTH, default=shared_width)
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", 1, num_experts, default=top_k),
        intermediate_size=config.integer("moe_intermediate_size", 1, _MAX_WIDTH, default=width),
        renormalised=config.boolean("norm_topk_prob", default=False),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
        sparse_step=config.integer("decoder_sparse_step", 1, 1 << 20, default=1),
        dense_layers=_dense_layers(config, num_layers),
        layout="qwen",
    )
    return moe if any(map(moe.is_sparse, range(num_layers))) else None


def _num_experts(config: JsonValues, default: int) -> int:
    """Under either of the two names that transformers has for it."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    return config.integer(key, 1, _MAX_EXPERTS, default=default)


def _dense_layers(config: JsonValues, num_layers: int) -> tuple[int, ...]:
    layers = config.raw("mlp_only_layers")
    if layers is None:
        return ()
    if not isinstance(layers, list) or any(type(index) is not int or index < 0 for index in layers):
        config.fail("mlp_only_layers", "a list of numbers of layers is needed")
    return tuple(sorted({index for index in layers if index < num_layers}))
