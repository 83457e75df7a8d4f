"""Architecture names, weight targets, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from oneloop.errors import ModelError
from oneloop.formats.model_spec import RopeScaling
from oneloop.layers.rotary import rope_frequencies
from oneloop.models.registry import ARCHITECTURES, build_model

CPU = torch.device("cpu")


def test_an_unknown_architecture_is_named_with_the_known_ones(make_spec):
    with pytest.raises(ModelError, match=r"GptNeoForCausalLM: architectures: .*supported: LlamaForCausalLM"):
        build_model(make_spec("GptNeoForCausalLM"), torch.float32, CPU)


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        ("LlamaForCausalLM", {"qk_norm": True}, "qk_norm"),
        ("Qwen2ForCausalLM", {"qkv_bias": False}, "qkv_bias"),
        ("Qwen3ForCausalLM", {"qk_norm": False}, "qk_norm"),
        ("LlamaForCausalLM", {"rope_scaling": RopeScaling(kind="factors", factors=(1.0,) * 5)}, "rope_freqs"),
        ("LlamaForCausalLM", {"rope_scaling": RopeScaling(kind="longrope")}, "rope_scaling"),
    ],
)
def test_a_switch_that_does_not_fit_is_named(make_spec, architecture, changes, key):
    with pytest.raises(ModelError) as caught:
        build_model(make_spec(architecture, **changes), torch.float32, CPU)
    assert caught.value.item == key


def test_factors_divide_the_frequencies(make_spec):
    """GGUF's rope_freqs: the same frequencies as the llama3 scaling they were made from."""
    llama3 = RopeScaling(kind="llama3", factor=8.0, original_max_position=64)
    plain, _ = rope_frequencies(make_spec("LlamaForCausalLM"))
    scaled, _ = rope_frequencies(make_spec("LlamaForCausalLM", rope_scaling=llama3))
    factors = tuple((plain / scaled).tolist())
    assert max(factors) == pytest.approx(8.0)
    scaling = RopeScaling(kind="factors", factors=factors)
    again, _ = rope_frequencies(make_spec("LlamaForCausalLM", rope_scaling=scaling))
    torch.testing.assert_close(again, scaled)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [True, False])
def test_targets_are_the_checkpoint_tensors(make_spec, twins, architecture, tied):
    pair = twins(make_spec(architecture, tie_word_embeddings=tied))
    expected = {name: tensor.shape for name, tensor in pair.tensors.items()}
    if tied:
        del expected["lm_head.weight"]
    assert {name: target.shape for name, target in pair.ours.weight_targets().items()} == expected


@pytest.mark.parametrize(
    ("architecture", "changes"), [("LlamaForCausalLM", {"qkv_bias": True}), ("Qwen2MoeForCausalLM", {})]
)
def test_targets_cover_every_parameter_once(make_spec, architecture, changes):
    spec = make_spec(architecture, tie_word_embeddings=True, **changes)
    model = build_model(spec, torch.float32, CPU)
    spans = sorted(
        (target.data_ptr(), target.data_ptr() + target.numel() * 4)
        for target in model.weight_targets().values()
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert model.head.stored.matrix.data_ptr() == model.embedding.weight.data_ptr()
