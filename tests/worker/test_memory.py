"""The memory plan's arithmetic and its complaints."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from oneloop.attention.kv_cache import PagedKVCache
from oneloop.cli.arguments import engine_values
from oneloop.cli.main import make_parser
from oneloop.config import EngineConfig, size_in_bytes
from oneloop.errors import ConfigError
from oneloop.formats.model_spec import ModelSpec, MoeSpec
from oneloop.models.registry import build_model
from oneloop.worker.memory.check import check_peak
from oneloop.worker.memory.free import machine_memory
from oneloop.worker.memory.gpu import (
    CONTEXT_BYTES,
    GEMM_WORKSPACE_BYTES,
    activation_bytes,
    attention_workspace_bytes,
    gpu_reserved,
    graph_driver_bytes,
    graph_pool_bytes,
    ordered_bytes,
    sampler_bytes,
)
from oneloop.worker.memory.ledger import DeviceMemory, MemoryPlanError
from oneloop.worker.memory.plan import plan_memory
from oneloop.worker.memory.sizes import block_bytes, kv_item_bytes, weight_bytes
from oneloop_core import Core, CoreConfig
from oneloop_kernels.ops.paged_attention import AttentionShape
from oneloop_kernels.ops.paged_attention.triton.attention import TritonAttention
from oneloop_kernels.ops.paged_attention.triton.configs import config_for
from oneloop_kernels.ops.paged_attention.triton.ordered_attention import OrderedAttention
from oneloop_kernels.ops.sampling.device import EditTables, SampleScratch, SlotSampling

CPU = torch.device("cpu")
GIB = 1 << 30
MIB = 1 << 20
H200 = DeviceMemory(total=150_754_820_096, free=150_000_000_000)
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=128_256, max_position=131_072, rms_norm_eps=1e-5, rope_theta=5e5,
    rope_scaling=None, tie_word_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    dtype="bfloat16",
)  # fmt: skip

EXPERTS = MoeSpec(num_experts=128, top_k=8, intermediate_size=768, renormalised=True, layout="qwen")


@pytest.fixture
def plan(make_spec):
    """Plan on a CPU for the tiny spec with settings by their flat names."""

    def run(free_bytes=8 * GIB, dtype="float32", spec=None, **settings):
        config = EngineConfig.from_flat({"device": "cpu", **settings})
        return plan_memory(spec or make_spec(), dtype, config, DeviceMemory(total=64 * GIB, free=free_bytes))

    return run


def gpu_plan(memory=H200, **settings):
    return plan_memory(LLAMA_8B, "bfloat16", EngineConfig.from_flat({"device": "cuda", **settings}), memory)


def test_keys_and_values_in_8_bits_take_half_the_memory():
    plain, narrow = gpu_plan(), gpu_plan(kv_cache_dtype="fp8")
    assert not plain.narrow_kv
    assert narrow.narrow_kv
    assert 0.999 * 2 * plain.num_blocks <= narrow.num_blocks <= 2 * plain.num_blocks + 1  # a larger workspace


def test_a_block_takes_what_the_cache_allocates(make_spec):
    spec = make_spec()
    narrow = PagedKVCache(spec, 5, 16, dtype=torch.float32, device=CPU, narrow=True).storage
    settings = EngineConfig.from_flat({"device": "cpu", "kv_cache_dtype": "fp8"})
    assert block_bytes(spec, 16, kv_item_bytes(settings, 4)) * 5 == narrow.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        storage = PagedKVCache(spec, 5, 16, dtype=dtype, device=CPU).storage
        assert block_bytes(spec, 16, dtype.itemsize) * 5 == storage.numel() * storage.element_size()


def test_weights_take_what_the_model_allocates(make_spec):
    shared = replace(EXPERTS, shared_intermediate_size=24, shared_gate=True)
    sparse = {"architecture": "Qwen3MoeForCausalLM", "moe": replace(EXPERTS, num_experts=6, sparse_step=2)}
    with_shared = {"architecture": "Qwen2MoeForCausalLM", "qkv_bias": True, "qk_norm": False, "moe": shared}
    changes = ({}, {"tie_word_embeddings": True}, sparse, with_shared)
    for spec in (make_spec(**change) for change in changes):
        targets = build_model(spec, torch.bfloat16, CPU).weight_targets().values()
        assert weight_bytes(spec, 2, on_gpu=False) == sum(target.nbytes for target in targets)


def test_sizes_given(plan):
    planned = plan(kv_cache_memory_bytes=MIB)
    assert planned.num_blocks == MIB // (2 * 16 * 4 * 16 * 4)
    assert plan(kv_cache_memory_bytes=MIB, dtype="bfloat16").num_blocks == 2 * planned.num_blocks
    assert plan(kv_cache_memory_bytes=MIB, num_gpu_blocks_override=8).num_blocks == 8
    assert plan(kv_cache_memory_bytes=MIB, block_size=32).num_blocks == planned.num_blocks // 2


def test_on_a_cpu_by_default_a_quarter_of_what_is_free_and_at_most_4_gib(plan):
    assert plan(free_bytes=2 * GIB).kv_cache_bytes == pytest.approx(GIB / 2, rel=1e-3)
    assert plan(free_bytes=100 * GIB).kv_cache_bytes == 4 * GIB


def test_the_context_is_the_models_own_or_as_asked(plan):
    assert plan().max_model_len == 128
    assert plan(max_model_len="auto").max_model_len == 128
    assert plan(max_model_len="auto", num_gpu_blocks_override=3).max_model_len == 48
    assert plan(max_model_len=40, num_gpu_blocks_override=3).max_model_len == 40


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"max_model_len": 129}, "max_model_len", "beyond the 128 positions"),
        (
            {"max_model_len": 49, "num_gpu_blocks_override": 3},
            "max_model_len",
            r"\(set\) .* auto \(or 48 at most\)",
        ),
        ({"num_gpu_blocks_override": 3}, "max_model_len", r"own\) .* --num-gpu-blocks-override 8"),
        ({"kv_cache_memory_bytes": 10_000}, "max_model_len", r"own\) .* --kv-cache-memory 64K"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes", "100 hold no block: .* takes 8K"),
        (
            {"kv_cache_memory_bytes": 9 * GIB},
            "kv_cache_memory_bytes",
            r"only 8G are free; .* --kv-cache-memory 7\.\d+G",
        ),
        ({"num_gpu_blocks_override": 1 << 20}, "num_gpu_blocks_override", r"--num-gpu-blocks-override \d+"),
        ({"free_bytes": MIB}, "kv_cache_memory_bytes", "no memory is left"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(plan, settings, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**settings)
    assert caught.value.field == field


def test_the_remedy_for_a_context_that_does_not_fit_is_enough(plan):
    with pytest.raises(ConfigError) as caught:
        plan(kv_cache_memory_bytes=10_000)
    enough = size_in_bytes(str(caught.value).rsplit(" ", 1)[1])
    assert plan(kv_cache_memory_bytes=enough).max_model_len == 128
    with pytest.raises(ConfigError):
        plan(kv_cache_memory_bytes=enough - 1)


GPU_24G = DeviceMemory(total=24 * GIB, free=24 * GIB)
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)


@pytest.mark.parametrize(
    ("memory", "dtype", "settings"),
    [
        (GPU_24G, "bfloat16", {}),
        (GPU_24G, "float32", {}),
        (GPU_24G, "bfloat16", {"kv_cache_memory_bytes": 1 * GIB}),
        (GPU_24G, "bfloat16", {"kv_cache_memory_bytes": 1024}),
        (GPU_24G, "bfloat16", {"kv_cache_memory_bytes": 50 * GIB}),
        (GPU_24G, "bfloat16", {"gpu_memory_utilization": 0.7}),
        (GPU_24G, "bfloat16", {"gpu_memory_utilization": 0.7, "max_model_len": 2048}),
        (replace(GPU_24G, free=12 * GIB), "bfloat16", {}),
        (DeviceMemory(total=24 * GIB, free=18 * GIB), "float32", {"device": "cpu"}),
        (DeviceMemory(total=128 * GIB, free=100 * GIB), "float32", {"device": "cpu"}),
    ],
)
def test_every_remedy_that_is_named_works(memory, dtype, settings):
    """Each is given to the command line, as a reader would."""
    settings = {"device": "cuda", **settings}
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(LLAMA_8B, dtype, EngineConfig.from_flat(settings), memory)
    remedies = str(caught.value).split("what helps: ")[1].split(", or ")
    assert remedies
    for remedy in remedies:
        words = re.sub(r"\(.*?\)|with ", "", remedy).split()
        free, options = memory.free, words
        if words[0] == "freeing":
            free, options = int(0.9 * memory.total), words[words.index("use") + 1 :]
        changed = {**settings, **engine_values(make_parser().parse_args(["serve", *options]))}
        config = EngineConfig.from_flat(changed)
        plan_memory(LLAMA_8B, changed.get("dtype", dtype), config, replace(memory, free=free))


def test_where_nothing_helps_it_says_so():
    with pytest.raises(
        MemoryPlanError, match="no setting makes room: it takes a smaller model, or a GPU with more"
    ):
        plan_memory(LLAMA_70B, "bfloat16", EngineConfig.from_flat({"device": "cuda"}), GPU_24G)


def test_activations_grow_with_the_step(plan):
    small, large = plan(max_num_batched_tokens=512), plan(max_num_batched_tokens=8192)
    assert large.ledger.reserved.activations > small.ledger.reserved.activations
    assert plan(max_num_seqs=1024).ledger.reserved.logits > plan(max_num_seqs=16).ledger.reserved.logits


def test_a_gpu_is_filled_to_its_utilization():
    for utilization in (0.5, 0.9):
        ledger = gpu_plan(gpu_memory_utilization=utilization).ledger
        assert ledger.usable == int(utilization * H200.total)
        assert 0 <= ledger.left < block_bytes(LLAMA_8B, 16, 2)
        assert ledger.planned == sum(ledger.reserved.items().values()) + ledger.kv_cache
    assert ledger.reserved.weights == 8_030_261_248 * 2  # the published number of parameters


def test_what_others_hold_on_the_gpu_is_not_ours():
    shared = gpu_plan(memory=replace(H200, free=40 * GIB))
    assert shared.ledger.usable == 40 * GIB
    with pytest.raises(ConfigError, match="no memory is left for the KV cache: of 16G") as caught:
        gpu_plan(memory=replace(H200, free=16 * GIB))
    assert caught.value.field == "gpu_memory_utilization"


def test_a_gpus_cache_of_a_given_size():
    planned = gpu_plan(kv_cache_memory_bytes=20 * GIB)
    assert planned.kv_cache_bytes == 20 * GIB
    assert planned.concurrency(131_072) == 1
    assert planned.concurrency(1000) == 20 * GIB // (63 * 16 * 131_072)
    with pytest.raises(ConfigError, match=r"what helps: --kv-cache-memory \d"):
        gpu_plan(kv_cache_memory_bytes=140 * GIB)


def test_items_follow_their_formulas():
    # residual, norm and projection of 4096, gate and up and their product of 14336 each; cos and sin
    assert activation_bytes(LLAMA_8B, 2, 100) == 100 * ((3 * 4096 + 3 * 14336) * 2 + 2 * 128 * 4)
    config = EngineConfig.from_flat({"device": "cuda"})
    reserved = gpu_reserved(LLAMA_8B, 2, config)
    assert reserved.context == CONTEXT_BYTES
    assert reserved.logits == 512 * (128_256 + 2 * 4096) * 2
    eager = EngineConfig.from_flat({"device": "cuda", "enforce_eager": True})
    assert replace(reserved, graphs=0) == gpu_reserved(LLAMA_8B, 2, eager)
    # The largest captured step again, a workspace; graphs of 32 layers, with shared prefixes (from 8 rows on) and
    # without; graphs of 31 batch sizes in 4 variants for each of 3 slabs.
    tensors = reserved.activations + reserved.logits
    num_layers = (40 + 31 + 40 + 28) * 32
    assert reserved.graphs == tensors + GEMM_WORKSPACE_BYTES + (num_layers + 31 * 4 * 3) * 34 * 1024


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "context"), [(4, 64, 4096), (512, 8192, 131_072), (1024, 2048, 64)]
)
def test_step_buffers_hold_the_slab(num_seqs, num_tokens, context):
    settings = {"device": "cuda", "max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
    config = EngineConfig.from_flat({**settings, "max_model_len": context})
    core = CoreConfig(
        num_blocks=64,
        vocab_size=LLAMA_8B.vocab_size,
        hidden_size=LLAMA_8B.hidden_size,
        max_model_len=context,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
    )
    planned = gpu_reserved(LLAMA_8B, 2, config).step_buffers
    tables = num_seqs * (-(-context // 16) + 1) * 4
    assert planned >= Core(core).layout.num_bytes + num_tokens * 16 + tables
    assert planned < 1.1 * Core(core).layout.num_bytes + num_tokens * 16 + tables + MIB


def test_the_sampler_allocates_what_is_planned():
    slots, vocab_size = 24, LLAMA_8B.vocab_size
    meta = torch.device("meta")
    allocated = [
        SlotSampling.allocate(slots, meta),
        SampleScratch.allocate(slots, vocab_size, meta),
        EditTables.allocate(slots, vocab_size, meta).with_history(),
    ]
    tensors = [getattr(group, item.name) for group in allocated for item in fields(group)]
    assert sum(tensor.nbytes for tensor in tensors) == sampler_bytes(LLAMA_8B, slots)


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_heads", [16, 32])
@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(8, 256), (64, 2048)])
def test_attention_allocates_no_more_than_planned(num_seqs, num_tokens, num_heads, cache_dtype):
    """On a card of 132 multiprocessors, every configuration in the tables."""
    planned = attention_workspace_bytes(
        replace(LLAMA_8B, num_heads=num_heads), num_seqs, num_tokens, narrow_kv=cache_dtype.itemsize == 1
    )
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=8, head_dim=128, block_size=16, scale=0.1)
    for config in (config_for("NVIDIA H200", 2, 128, num_heads // 8), config_for("", 2, 128)):
        attention = TritonAttention(
            shape, max_rows=num_seqs, max_tokens=num_tokens, max_blocks_per_row=512, dtype=torch.float16, device=CPU,
            config=config, sms=132, cache_dtype=cache_dtype,
        )  # fmt: skip
        space = attention._space
        tensors = [getattr(space, item.name) for item in fields(space)]
        allocated = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        assert allocated <= planned
        assert planned - allocated < 2 * MIB + allocated


def test_the_fixed_order_has_its_place():
    """Its graphs beside or instead of the others, none of which look for shared prefixes; and its workspaces."""

    def reserved(**settings):
        return gpu_reserved(LLAMA_8B, 2, EngineConfig.from_flat({"device": "cuda", **settings}))

    default, both = reserved(), reserved(deterministic_requests=True)
    graph_bytes = 34 * 1024
    assert both.graphs == default.graphs + ((40 + 31) * 32 + 31 * 4 * 3) * graph_bytes
    alone = reserved(deterministic=True)
    assert alone.graphs == default.graphs - (40 + 28) * 32 * graph_bytes
    num_tokens = 2048
    planned = ordered_bytes(LLAMA_8B, num_tokens)
    assert alone.workspaces - default.workspaces == both.workspaces - default.workspaces == planned
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, scale=0.1)
    attention = OrderedAttention(
        shape, scale_log2=1.0, max_rows=512, max_tokens=num_tokens, device=CPU, sms=132
    )
    tensors = [value for value in vars(attention).values() if isinstance(value, torch.Tensor)]
    sums = 2 * 132 * 128 * 256 * 4
    allocated = sums + sum(tensor.nbytes for tensor in tensors)
    assert allocated <= planned < 1.3 * allocated


@pytest.mark.parametrize(
    ("architecture", "sizes", "measured"),
    [
        # MiB as oneloop_bench.ledger measured them on an H200, 512 sequences, 2,048 tokens; of the graphs those of
        # 71 forward passes and 93 samplings.
        ("LlamaForCausalLM", {}, {"activations": 201, "logits": 130, "graphs": 426, "weights": 15_317}),
        (
            "Qwen3ForCausalLM",
            {
                "hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "qk_norm": True,
                "vocab_size": 151_936, "tie_word_embeddings": True,
            },
            {"activations": 45, "logits": 149, "graphs": 276, "weights": 1138},
        ),
    ],
)  # fmt: skip
def test_what_was_measured_is_what_is_planned(architecture, sizes, measured):
    """Never less than 0.1 % below, and little above."""
    spec = replace(LLAMA_8B, architecture=architecture, **sizes)
    planned = gpu_reserved(spec, 2, EngineConfig.from_flat({"device": "cuda"})).items()
    planned |= {"graphs": graph_pool_bytes(spec, 2, 2048, 512) + graph_driver_bytes(spec, 71, 93)}
    for item, mib in measured.items():
        assert 0.999 * mib <= planned[item] / MIB < 1.2 * mib + 32, item


class TestCheckPeak:
    """A measurement beside the plan."""

    def test_as_planned(self, caplog):
        planned = gpu_plan()
        free_after = H200.free - planned.ledger.planned
        for difference in (0, GIB, -GIB):
            assert check_peak(planned, free_after + difference) == planned.ledger.planned - difference
        assert caplog.records == []

    def test_what_comes_later_counts_as_taken(self):
        planned = gpu_plan()
        free_after = H200.free - planned.ledger.planned
        assert check_peak(planned, free_after + GIB, later=GIB) == planned.ledger.planned
        with pytest.raises(ConfigError):
            check_peak(
                gpu_plan(gpu_memory_utilization=0.5), H200.free - planned.ledger.planned // 2, later=9 * GIB
            )

    def test_far_less_is_said(self, caplog):
        planned = gpu_plan()
        with caplog.at_level(logging.WARNING):
            check_peak(planned, H200.free - planned.ledger.planned + 10 * GIB)
        assert "(-7.9 %)" in caplog.text

    def test_more_than_may_be_used_ends_the_start(self):
        planned = gpu_plan(gpu_memory_utilization=0.5)
        with pytest.raises(ConfigError, match=r"5\.00 GiB more than planned .* at most 0\.46") as caught:
            check_peak(planned, H200.free - planned.ledger.planned - 5 * GIB)
        assert caught.value.field == "gpu_memory_utilization"


def test_the_machines_memory_is_plausible():
    memory = machine_memory()
    assert 64 * MIB < memory.free <= memory.total < 1 << 50


def test_planning_imports_no_torch():
    code = "import sys, oneloop.worker.memory.plan, oneloop.worker.memory.free; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
