"""The memory plan's arithmetic and its complaints."""

from __future__ import annotations

import pytest
import torch

from oneloop.attention.kv_cache import PagedKVCache, block_bytes
from oneloop.config import EngineConfig
from oneloop.errors import ConfigError
from oneloop.worker.memory import free_memory, plan_memory

CPU = torch.device("cpu")
GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def plan(make_spec):
    """Plan for the tiny spec with settings by their flat names."""

    def run(free_bytes=8 * GIB, dtype=torch.float32, spec=None, **settings):
        return plan_memory(spec or make_spec(), dtype, EngineConfig.from_flat(settings), free_bytes)

    return run


def test_a_block_takes_what_the_cache_allocates(make_spec):
    spec = make_spec()
    for dtype in (torch.float32, torch.bfloat16):
        storage = PagedKVCache(spec, 5, 16, dtype=dtype, device=CPU).storage
        assert block_bytes(spec, 16, dtype) * 5 == storage.numel() * storage.element_size()


def test_sizes_given(plan):
    planned = plan(kv_cache_memory_bytes=MIB)
    assert planned.num_blocks == MIB // (2 * 16 * 4 * 16 * 4)
    assert plan(kv_cache_memory_bytes=MIB, dtype=torch.bfloat16).num_blocks == 2 * planned.num_blocks
    assert plan(kv_cache_memory_bytes=MIB, num_gpu_blocks_override=7).num_blocks == 7
    assert plan(kv_cache_memory_bytes=MIB, block_size=32).num_blocks == planned.num_blocks // 2


def test_by_default_a_quarter_of_what_is_free_and_at_most_4_gib(plan):
    assert plan(free_bytes=2 * GIB).kv_cache_bytes == pytest.approx(GIB / 2, rel=1e-4)
    assert plan(free_bytes=100 * GIB).kv_cache_bytes == 4 * GIB


def test_the_context_is_as_long_as_model_and_pool_allow(plan):
    assert plan().max_model_len == 128
    assert plan(num_gpu_blocks_override=3).max_model_len == 48
    assert plan(max_model_len=40, num_gpu_blocks_override=3).max_model_len == 40


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"max_model_len": 129}, "max_model_len", "beyond the 128 positions"),
        ({"max_model_len": 1}, "max_model_len", "at least 2"),
        ({"max_model_len": 49, "num_gpu_blocks_override": 3}, "max_model_len", "at most 48"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes", "takes 8192 bytes"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override", "at least 1"),
        ({"block_size": 0}, "block_size", "at least 1"),
        ({"kv_cache_memory_bytes": 9 * GIB}, "kv_cache_memory_bytes", "only 8192 MiB are free"),
        ({"num_gpu_blocks_override": 1 << 20}, "num_gpu_blocks_override", "make the cache smaller"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(plan, settings, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan(**settings)
    assert caught.value.field == field


def test_activations_grow_with_the_step(plan):
    small, large = plan(max_num_batched_tokens=512), plan(max_num_batched_tokens=8192)
    assert large.activation_bytes > small.activation_bytes
    assert plan(max_num_seqs=1024).activation_bytes > plan(max_num_seqs=16).activation_bytes


def test_free_memory_is_plausible():
    free = free_memory(CPU)
    assert 64 * MIB < free < 1 << 50
