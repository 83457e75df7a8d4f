"""Hidden states of every layer, and logits, equal transformers' on the same weights."""

from __future__ import annotations

import pytest
import torch

from oneloop.formats.model_spec import RopeScaling
from oneloop_kernels.testing import assert_close

FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
VARIANTS = {
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "attention-bias": ("LlamaForCausalLM", {"qkv_bias": True, "output_bias": True}),
    "mlp-bias": ("LlamaForCausalLM", {"mlp_bias": True}),
    "one-key-head": ("LlamaForCausalLM", {"num_kv_heads": 1}),
    "no-sharing": ("LlamaForCausalLM", {"num_kv_heads": 4}),
    "linear": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
    "dynamic": ("LlamaForCausalLM", {"rope_scaling": RopeScaling(kind="dynamic", factor=2.0)}),
    "llama3": (
        "LlamaForCausalLM",
        {
            "rope_scaling": RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
            )
        },
    ),
    "yarn": (
        "Qwen3ForCausalLM",
        {
            "rope_scaling": RopeScaling(
                kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.1386
            )
        },
    ),
    "yarn-untruncated": (
        "LlamaForCausalLM",
        {
            "rope_scaling": RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_position=64,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
            )
        },
    ),
}


def check_layers(pair, token_ids):
    """Run ours layer by layer on the inputs that transformers' layers had, so that errors do not add up.

    transformers computes in float32 from the same (rounded) weights and, in each layer, from the same rounded input.
    """
    truth = pair.hf.float()
    dtype = pair.ours.dtype
    table = pair.ours.embedding.weight
    rotary, embedded = pair.ours.rotary.with_embedding(torch.arange(len(token_ids)), token_ids, table)
    metadata = pair.metadata(0, len(token_ids))
    with torch.inference_mode():
        state = truth.model.embed_tokens(token_ids)
        assert torch.equal(embedded, state.to(dtype))
        angles = truth.model.rotary_emb(state[None], torch.arange(len(token_ids))[None])
        for layer, expected_layer in zip(pair.ours.layers, truth.model.layers, strict=True):
            expected = expected_layer(state[None], attention_mask=None, position_embeddings=angles)[0]
            actual = state.to(dtype)
            layer(actual, rotary, pair.kv, metadata)
            assert_close(actual, expected)
            state = expected.to(dtype).float()
        assert_close(pair.ours.norm(state.to(dtype)), truth.model.norm(state))
        assert_close(pair.ours.compute_logits(state.to(dtype)), truth.lm_head(truth.model.norm(state)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_layer_of_each_family(twins, make_spec, architecture, dtype):
    head_dim = {"head_dim": 16} if architecture == "Qwen2ForCausalLM" else {}
    pair = twins(make_spec(architecture, **head_dim), dtype)
    check_layers(pair, torch.arange(37) * 5 % 211)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_layer_of_each_variant(twins, make_spec, variant):
    architecture, changes = VARIANTS[variant]
    pair = twins(make_spec(architecture, **changes))
    check_layers(pair, torch.arange(101) * 7 % 211)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_after_all_layers(twins, make_spec, architecture):
    head_dim = {"head_dim": 16} if architecture == "Qwen2ForCausalLM" else {}
    pair = twins(make_spec(architecture, **head_dim))
    token_ids = torch.arange(50) * 11 % 211
    with torch.inference_mode():
        expected = pair.hf(token_ids[None]).logits[0]
        assert_close(pair.ours.compute_logits(pair.forward(token_ids)), expected)


def test_a_scaling_that_is_left_out_shows(twins, make_spec):
    """The comparison above can fail: without its scaling the model is another one."""
    scaling = RopeScaling(kind="linear", factor=4.0)
    pair = twins(make_spec("LlamaForCausalLM", rope_scaling=scaling))
    plain = twins(make_spec("LlamaForCausalLM"))
    pair.hf = plain.hf
    with pytest.raises(AssertionError, match="times the tolerance"):
        check_layers(pair, torch.arange(40))


@pytest.mark.parametrize("chunks", [[1] * 30, [7, 1, 1, 13, 8], [16, 14], [29, 1]])
def test_chunks_equal_the_whole(twins, make_spec, chunks):
    pair = twins(make_spec("Qwen3ForCausalLM"))
    token_ids = torch.arange(30) * 17 % 211
    with torch.inference_mode():
        whole = pair.hf(token_ids[None]).logits[0]
        first = 0
        for size in chunks:
            hidden = pair.forward(token_ids[first : first + size], first)
            assert_close(pair.ours.compute_logits(hidden), whole[first : first + size])
            first += size


def test_one_layer_of_each_kind(twins, make_spec):
    """Within, fewer layers run; after it, whatever ended it, all do."""
    pair = twins(make_spec("LlamaForCausalLM"))
    token_ids = torch.arange(9)
    with torch.inference_mode():
        before = pair.forward(token_ids)
        with pair.ours.one_layer_of_each_kind():
            shortened = pair.forward(token_ids)
        with pytest.raises(ValueError, match="over"), pair.ours.one_layer_of_each_kind():
            raise ValueError("over")
        assert shortened.shape == before.shape
        assert not torch.equal(shortened, before)
        assert torch.equal(pair.forward(token_ids), before)
