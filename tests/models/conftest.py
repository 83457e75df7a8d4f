"""Tiny random models of every family, built by transformers, and the same weights in ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.formats.expected import EXPERT_NAMES
from oneloop.formats.model_spec import ModelSpec, MoeSpec, RopeScaling
from oneloop.models.base import Model
from oneloop.models.registry import build_model
from oneloop_kernels.ops.paged_attention import PAGED_ATTENTION, AttentionRows, AttentionShape

CPU = torch.device("cpu")
_HEADS_FILL_HIDDEN = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
BLOCK_SIZE = 4
NUM_BLOCKS = 64


EXPERTS = {
    "MixtralForCausalLM": MoeSpec(
        num_experts=5, top_k=2, intermediate_size=112, renormalised=True, layout="mixtral"
    ),
    "Qwen2MoeForCausalLM": MoeSpec(
        num_experts=6,
        top_k=3,
        intermediate_size=40,
        renormalised=False,
        shared_intermediate_size=72,
        shared_gate=True,
        sparse_step=2,
        layout="qwen",
    ),
    "Qwen3MoeForCausalLM": MoeSpec(
        num_experts=8, top_k=4, intermediate_size=48, renormalised=True, dense_layers=(1,), layout="qwen"
    ),
}


def tiny_spec(architecture: str, **changes: Any) -> ModelSpec:
    """Three layers, four heads over two key heads, head_dim not hidden / heads (but where that has to be)."""
    spec = ModelSpec(
        architecture=architecture,
        hidden_size=64,
        intermediate_size=112,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if architecture in _HEADS_FILL_HIDDEN else 24,
        vocab_size=211,
        max_position=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
        output_bias=False,
        mlp_bias=False,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        dtype="float32",
        moe=EXPERTS.get(architecture),
    )
    return replace(spec, **changes)


def rope_parameters(scaling: RopeScaling | None, theta: float) -> dict[str, Any]:
    """Hugging Face's form of our scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    parameters: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        parameters["low_freq_factor"] = scaling.low_freq_factor
        parameters["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        parameters["beta_fast"] = scaling.beta_fast
        parameters["beta_slow"] = scaling.beta_slow
        parameters["attention_factor"] = scaling.attention_factor
        parameters["truncate"] = scaling.truncate
    return parameters


def moe_options(moe: MoeSpec) -> dict[str, Any]:
    """Hugging Face's form of our experts."""
    if moe.layout == "mixtral":
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    options = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.renormalised,
        "decoder_sparse_step": moe.sparse_step,
        "mlp_only_layers": list(moe.dense_layers),
    }
    if moe.shared_intermediate_size:
        options["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return options


def checkpoint_tensors(hf: Any, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """The model's tensors under their names in checkpoints, where transformers stacks experts only in memory."""
    tensors = dict(hf.state_dict())
    if spec.moe is None:
        return tensors
    names = EXPERT_NAMES[spec.moe.layout]
    for name in [name for name in tensors if ".mlp." in name]:
        layer, _, rest = name.partition(".mlp.")
        tensor = tensors.pop(name)
        if rest == "experts.gate_up_proj":
            for expert, halves in enumerate(tensor):
                for part, half in zip((names.gate, names.up), halves.chunk(2), strict=True):
                    tensors[f"{layer}.{names.block}.experts.{expert}.{part}.weight"] = half
        elif rest == "experts.down_proj":
            for expert, weight in enumerate(tensor):
                tensors[f"{layer}.{names.block}.experts.{expert}.{names.down}.weight"] = weight
        else:
            tensors[f"{layer}.{names.block}.{rest}"] = tensor
    return tensors


def hf_model(spec: ModelSpec) -> Any:
    """transformers' model of that shape with random weights, norms and biases included."""
    config_class, model_class = {
        "LlamaForCausalLM": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "MistralForCausalLM": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "Qwen2ForCausalLM": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "MixtralForCausalLM": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "Qwen2MoeForCausalLM": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
        "Qwen3MoeForCausalLM": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[spec.architecture]
    options: dict[str, Any] = {}
    if spec.architecture == "LlamaForCausalLM":
        options = {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    if spec.architecture == "MistralForCausalLM":
        options = {"sliding_window": None}
    if spec.architecture not in _HEADS_FILL_HIDDEN:
        options["head_dim"] = spec.head_dim
    if spec.moe is not None:
        options |= moe_options(spec.moe)
    config = config_class(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters=rope_parameters(spec.rope_scaling, spec.rope_theta),
        **options,
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


@dataclass
class Twins:
    """One model twice, and a cache for ours. tensors: the weights, by their names in checkpoints."""

    hf: Any
    tensors: dict[str, torch.Tensor]
    ours: Model
    kv: PagedKVCache
    block_table: torch.Tensor

    def metadata(self, first: int, last: int) -> AttentionMetadata:
        """A step that computes the tokens [first, last) of the only row."""
        spec = self.ours.spec
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.head_dim**-0.5
        )
        rows = AttentionRows(
            num_scheduled=np.array([last - first], np.int32),
            num_computed=np.array([first], np.int32),
            num_single=int(last - first == 1),
            block_tables=self.block_table[None],
        )
        positions = torch.arange(first, last)
        slots = self.block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        plan = PAGED_ATTENTION.resolve(CPU, self.ours.dtype)(shape, rows, self.ours.dtype)
        return AttentionMetadata(num_tokens=last - first, slots=slots, plan=plan)

    def forward(self, token_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Hidden states of tokens that follow `first` computed ones."""
        last = first + len(token_ids)
        return self.ours.forward(token_ids, torch.arange(first, last), self.kv, self.metadata(first, last))


@pytest.fixture
def twins() -> Callable[..., Twins]:
    """Factory: spec, dtype → the same weights in transformers' model and in ours."""

    def build(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Twins:
        hf = hf_model(spec)
        # Parameters alone: rotary frequencies stay float32, as when a checkpoint is loaded.
        for parameter in hf.parameters():
            parameter.data = parameter.data.to(dtype)
        ours = build_model(spec, dtype, CPU)
        source = checkpoint_tensors(hf, spec)
        for name, target in ours.weight_targets().items():
            target.copy_(source[name])
        kv = PagedKVCache(spec, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=CPU)
        kv.storage.fill_(float("nan"))  # whatever is read before it was written shows
        table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2))
        return Twins(hf, source, ours, kv, table)

    return build


@pytest.fixture
def make_spec() -> Callable[..., ModelSpec]:
    """Factory: architecture, changes → a tiny ModelSpec."""
    return tiny_spec
