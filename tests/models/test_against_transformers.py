"""Hidden states of every layer, and logits, equal transformers' on the same weights."""

from __future__ import annotations

import pytest
import torch

from oneloop.formats.model_spec import RopeScaling
from oneloop_kernels.testing import assert_close
from oneloop_kernels.testing.tolerances import ROUNDOFF

SPARSE_FAMILIES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
FAMILIES = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *SPARSE_FAMILIES,
]
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


def decided(logits, top_k, dtype):
    """Tokens that rounding to the type sends to no other experts: the last chosen is well above the first that is not.

    All in float32. Rounding puts logits off by some part of their spread, as it does the activations.
    """
    if dtype is torch.float32:
        return torch.ones(len(logits), dtype=torch.bool)
    ordered = logits.sort(descending=True).values
    gap = ordered[:, top_k - 1] - ordered[:, top_k]
    return gap > 10 * ROUNDOFF[dtype] * logits.square().mean().sqrt()


def check_layers(pair, token_ids):
    """Run ours layer by layer on the inputs that transformers' layers had, so that errors do not add up.

    transformers computes in float32 from the same (rounded) weights and, in each layer, from the same rounded input.
    Of a sparse layer, those tokens are compared whose experts do not hang on the last bit.
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
            routers = []
            if layer.sparse is not None:
                expected_layer.mlp.gate.register_forward_hook(
                    lambda _module, _inputs, outputs, routers=routers: routers.append(outputs[0])
                )
            expected = expected_layer(state[None], attention_mask=None, position_embeddings=angles)[0]
            actual = state.to(dtype)
            layer(actual, rotary, pair.kv, metadata)
            rows = torch.ones(len(token_ids), dtype=torch.bool)
            if layer.sparse is not None:
                rows = decided(routers[0], pair.ours.spec.moe.top_k, dtype)
                assert rows.float().mean() > 0.5
            assert_close(actual[rows], expected[rows])
            state = expected.to(dtype).float()
        assert_close(pair.ours.norm(state.to(dtype)), truth.model.norm(state))
        assert_close(pair.ours.compute_logits(state.to(dtype)), truth.lm_head(truth.model.norm(state)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_layer_of_each_family(twins, make_spec, architecture, dtype):
    pair = twins(make_spec(architecture), dtype)
    check_layers(pair, torch.arange(37) * 5 % 211)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_layer_of_each_variant(twins, make_spec, variant):
    architecture, changes = VARIANTS[variant]
    pair = twins(make_spec(architecture, **changes))
    check_layers(pair, torch.arange(101) * 7 % 211)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_after_all_layers(twins, make_spec, architecture):
    pair = twins(make_spec(architecture))
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


def test_the_kinds_of_layers(twins, make_spec):
    """Where some are sparse and some dense, one of each runs, in their order."""
    for architecture, kinds in (("Qwen3MoeForCausalLM", [True, False]), ("MixtralForCausalLM", [True])):
        ours = twins(make_spec(architecture)).ours
        with ours.one_layer_of_each_kind():
            assert sorted(layer.sparse is not None for layer in ours.layers) == sorted(kinds)


@pytest.mark.parametrize("num_tokens", [1, 3, 530])
def test_a_shared_expert_beside_parts_of_a_long_step(twins, make_spec, num_tokens):
    """On a CPU more than 512 tokens are computed in parts; one token is computed as two rows."""
    pair = twins(make_spec("Qwen2MoeForCausalLM", num_layers=2, max_position=1024))
    layer, truth = pair.ours.layers[1], pair.hf.model.layers[1]
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = x + truth.mlp(truth.post_attention_layernorm(x)[None])[0]
        actual = x.clone()
        layer.sparse(actual, norm=layer.mlp_norm, slots=torch.arange(num_tokens))
    assert_close(actual, expected)
