"""The tensors that headers are checked for are those that the models fill."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from oneloop.formats.expected import expected_tensors, num_parameters
from oneloop.formats.model_spec import ModelSpec, MoeSpec
from oneloop.models.registry import ARCHITECTURES, build_model

BASE = ModelSpec(
    architecture="LlamaForCausalLM", hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=8, vocab_size=50, max_position=64, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
    tie_word_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, dtype="float32",
)  # fmt: skip
MIXTRAL = MoeSpec(num_experts=4, top_k=2, intermediate_size=40, renormalised=True, layout="mixtral")
QWEN_MOE = replace(MIXTRAL, intermediate_size=16, layout="qwen")
SHARED = replace(QWEN_MOE, shared_intermediate_size=56, shared_gate=True)
SWITCHES = {
    "LlamaForCausalLM": [{}, {"qkv_bias": True, "output_bias": True}, {"mlp_bias": True}],
    "MistralForCausalLM": [{}],
    "MixtralForCausalLM": [{"moe": MIXTRAL}],
    "Qwen2ForCausalLM": [{"qkv_bias": True}],
    "Qwen2MoeForCausalLM": [{"qkv_bias": True, "moe": SHARED}, {"qkv_bias": True, "moe": None}],
    "Qwen3MoeForCausalLM": [
        {"qk_norm": True, "moe": replace(QWEN_MOE, sparse_step=2)},
        {"qk_norm": True, "moe": replace(QWEN_MOE, dense_layers=(1,))},
    ],
    "Qwen3ForCausalLM": [{"qk_norm": True}, {"qk_norm": True, "qkv_bias": True, "output_bias": True}],
}


def test_every_family_is_compared():
    assert set(SWITCHES) == set(ARCHITECTURES)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("architecture", "switches"), [(name, one) for name, all_of in SWITCHES.items() for one in all_of]
)
def test_expected_tensors_are_the_models_targets(architecture, switches, tied):
    spec = replace(BASE, architecture=architecture, tie_word_embeddings=tied, **switches)
    targets = build_model(spec, torch.float32, torch.device("cpu")).weight_targets()
    assert expected_tensors(spec) == {name: tuple(target.shape) for name, target in targets.items()}
    assert num_parameters(spec) == sum(prod(shape) for shape in expected_tensors(spec).values())
