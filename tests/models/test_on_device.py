"""Each layer of each family with the GPU's kernels, planned on the device, against transformers in float32.

On a GPU (`-m gpu`) in every dtype; without one, one small case in Triton's interpreter keeps this test itself right.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.attention.metadata import AttentionMetadata
from oneloop.formats.quantization.int4 import Int4Scheme
from oneloop.formats.quantization.spec import QuantizationSpec
from oneloop.models.base import Model
from oneloop.models.registry import build_model
from oneloop.quant.base import Incoming
from oneloop_kernels.launch import INTERPRETED
from oneloop_kernels.ops.packed_linear.plans import StreamPlan
from oneloop_kernels.ops.paged_attention import DEVICE_ATTENTION, AttentionShape, AttentionStep
from oneloop_kernels.registry import TRITON, prefer
from oneloop_kernels.testing import assert_as_accurate, assert_close

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 48
MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE
FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
SPARSE_FAMILIES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
if ON_GPU:
    pytestmark = pytest.mark.gpu
    CASES = [
        (name, dtype, size)
        for name in FAMILIES
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for size in ((64, 300), (128, 700))
        if (name, size[0]) != ("Qwen2ForCausalLM", 128)
    ]
    # Of experts in float32, where rounding sends no token elsewhere.
    CASES += [(name, torch.float32, (16, 700)) for name in SPARSE_FAMILIES]
else:
    CASES = [("Qwen3ForCausalLM", torch.float32, (64, 18))]
SIZES = {"num_layers": 3, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
if not ON_GPU:
    SIZES = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}


def random(shape: tuple[int, ...] | int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape if isinstance(shape, tuple) else (shape,), generator=generator)


@dataclass
class DevicePair:
    """transformers' model and ours on the device, with a cache whose blocks lie in random order."""

    hf: Any
    ours: Model
    kv: PagedKVCache
    table: torch.Tensor

    def planner(self) -> Any:
        spec = self.ours.spec
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.head_dim**-0.5
        )
        return DEVICE_ATTENTION.resolve(DEVICE, self.ours.dtype)(
            shape,
            max_rows=1,
            max_tokens=MAX_TOKENS,
            max_blocks_per_row=NUM_BLOCKS,
            dtype=self.ours.dtype,
            device=DEVICE,
        )

    def metadata(self, planner: Any, first: int, last: int) -> AttentionMetadata:
        """A step with the tokens [first, last) of the only row, as `worker.gpu.runner` makes it."""

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        is_single = last - first == 1
        step = AttentionStep(
            row_slot=ints(0),
            seq_lens=ints(last),
            query_start=ints(0, last - first),
            num_rows=ints(1),
            num_single=ints(int(is_single)),
            block_tables=self.table[None].to(torch.int32).contiguous(),
        )
        positions = torch.arange(first, last, device=DEVICE)
        slots = self.table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        plan = planner.plan(step, 1, last - first, not is_single)
        return AttentionMetadata(num_tokens=last - first, slots=slots, plan=plan)


@pytest.fixture
def device_pair(twins, make_spec):
    """Factory: architecture, dtype, head_dim → the same weights on both sides."""

    def build(architecture: str, dtype: torch.dtype, head_dim: int) -> DevicePair:
        spec = make_spec(architecture, **SIZES, head_dim=head_dim, max_position=MAX_TOKENS)
        if architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"):
            spec = replace(spec, hidden_size=spec.num_heads * head_dim)
        pair = twins(spec, dtype)
        with prefer(TRITON):
            ours = build_model(spec, dtype, DEVICE)
            kv = PagedKVCache(spec, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=DEVICE)
        for name, target in ours.weight_targets().items():
            target.copy_(pair.tensors[name])
        kv.storage.fill_(float("nan"))  # whatever is read before it was written shows
        table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        return DevicePair(pair.hf.float().to(DEVICE), ours, kv, table)

    return build


@pytest.mark.parametrize(("architecture", "dtype", "size"), CASES, ids=str)
@torch.inference_mode()
def test_each_layer_on_the_inputs_of_transformers(device_pair, architecture, dtype, size):
    """So errors do not add up: each of ours starts from what transformers' layer gave, rounded to the dtype."""
    head_dim, num_tokens = size
    pair = device_pair(architecture, dtype, head_dim)
    token_ids = random(num_tokens, SIZES["vocab_size"], seed=3).to(DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE)
    with prefer(TRITON):
        metadata = pair.metadata(pair.planner(), 0, num_tokens)
        rotary, embedded = pair.ours.rotary.with_embedding(
            positions.to(torch.int32), token_ids.to(torch.int32), pair.ours.embedding.weight
        )
        state = pair.hf.model.embed_tokens(token_ids)
        assert torch.equal(embedded, state.to(dtype))
        angles = pair.hf.model.rotary_emb(state[None], positions[None])
        for layer, expected_layer in zip(pair.ours.layers, pair.hf.model.layers, strict=True):
            expected = expected_layer(state[None], attention_mask=None, position_embeddings=angles)[0]
            actual = state.to(dtype)
            layer(actual, rotary, pair.kv, metadata)
            if dtype is torch.float32:
                assert_close(actual, expected)
            else:
                plain_layer, plain_angles = (
                    deepcopy(expected_layer).to(dtype),
                    [part.to(dtype) for part in angles],
                )
                plain = plain_layer(
                    state[None].to(dtype), attention_mask=None, position_embeddings=plain_angles
                )[0]
                assert_as_accurate(actual, plain, expected)
            state = expected.to(dtype).float()
        logits = pair.ours.compute_logits(state.to(dtype))
        assert_close(logits, pair.hf.lm_head(pair.hf.model.norm(state)), dtype)


@pytest.mark.parametrize(("architecture", "dtype", "size"), CASES, ids=str)
@torch.inference_mode()
def test_chunks_and_single_tokens_equal_the_whole(device_pair, architecture, dtype, size):
    """The same hidden states however the row is cut into steps: chunked prefill, then decode over a block's edge."""
    head_dim, num_tokens = size
    pair = device_pair(architecture, dtype, head_dim)
    token_ids = random(num_tokens, SIZES["vocab_size"], seed=4).to(DEVICE, torch.int32)
    with prefer(TRITON):
        planner = pair.planner()
        whole = forward(pair, planner, token_ids, 0)
        pair.kv.storage.fill_(float("nan"))
        cut = num_tokens // 32 * 32 or BLOCK_SIZE
        parts = [forward(pair, planner, token_ids[:cut], 0)]
        singles = range(cut, min(num_tokens, cut + 18))
        parts += [forward(pair, planner, token_ids[at : at + 1], at) for at in singles]
    together = torch.cat(parts)
    # Both are rounded at every layer: the error of a layer adds up over three of them, on either side.
    error = (together - whole[: len(together)]).float().norm() / whole[: len(together)].float().norm()
    assert error < {torch.float32: 3e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.fixture
def packed_model(make_spec):
    """Factory: dtype, head_dim → a model whose maps have 4 bits, in groups of 128, weights of ordinary size."""

    def build(dtype: torch.dtype, head_dim: int) -> DevicePair:
        sizes = SIZES | {"hidden_size": 256, "intermediate_size": 384}
        spec = make_spec("LlamaForCausalLM", **sizes, head_dim=head_dim, max_position=MAX_TOKENS)
        spec = replace(
            spec,
            quantization=QuantizationSpec(
                method="gptq", scheme=Int4Scheme(layout="gptq", group_size=128, zero_points=False)
            ),
        )
        generator = torch.Generator().manual_seed(5)
        with prefer(TRITON):
            model = build_model(spec, dtype, DEVICE)
            kv = PagedKVCache(spec, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=DEVICE)
        for name, target in model.weight_targets().items():
            if isinstance(target, Incoming) and target.sample is not None:
                values = target.sample()
            elif target.dtype is torch.int32:
                values = torch.randint(-(1 << 31), 1 << 31, target.shape, generator=generator)
            elif name.endswith("scales"):
                values = torch.rand(target.shape, generator=generator) * 0.02 + 0.001
            else:
                values = torch.randn(target.shape, generator=generator) * 0.1 + ("norm" in name)
            values = values.to(DEVICE, target.dtype)
            target.take(values) if isinstance(target, Incoming) else target.copy_(values)
        kv.storage.fill_(float("nan"))
        table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        return DevicePair(None, model, kv, table)

    return build


@pytest.mark.parametrize("slices", [True, False] if ON_GPU else [True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float16], ids=str)
@torch.inference_mode()
def test_packed_single_tokens_equal_the_whole(packed_model, monkeypatch, dtype, slices):
    """The whole is computed with weights written out, single tokens with those unpacked in the product: rotated and
    stored by the same kernel, or by one of their own."""
    plan = StreamPlan(1, 4, residents=2, slices=slices)
    monkeypatch.setattr("oneloop_kernels.ops.packed_linear.plans._by_rule", lambda *_: plan)
    num_tokens, num_singles = (90, 20) if ON_GPU else (36, 1)
    pair = packed_model(dtype, 128)
    token_ids = random(num_tokens, SIZES["vocab_size"], seed=4).to(DEVICE, torch.int32)
    with prefer(TRITON):
        planner = pair.planner()
        whole = forward(pair, planner, token_ids, 0)
        pair.kv.storage.fill_(float("nan"))
        cut = num_tokens - num_singles
        forward(pair, planner, token_ids[:cut], 0)
        singles = [forward(pair, planner, token_ids[at : at + 1], at) for at in range(cut, num_tokens)]
    together = torch.cat(singles)
    error = (together - whole[cut:]).float().norm() / whole[cut:].float().norm()
    assert error < {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


def forward(pair: DevicePair, planner: Any, token_ids: torch.Tensor, first: int) -> torch.Tensor:
    last = first + len(token_ids)
    positions = torch.arange(first, last, dtype=torch.int32, device=DEVICE)
    return pair.ours.forward(token_ids, positions, pair.kv, pair.metadata(planner, first, last)).clone()
