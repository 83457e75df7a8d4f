"""Memory planned by arithmetic: how many KV blocks, and how long a context, fit beside weights and activations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from oneloop.attention.kv_cache import block_bytes
from oneloop.errors import ConfigError
from oneloop.layers.mlp import MAX_TOKENS_AT_ONCE
from oneloop_kernels.ops.linear import padded_num_tokens

if TYPE_CHECKING:
    from oneloop.config import CacheConfig, EngineConfig
    from oneloop.formats.model_spec import ModelSpec

_DEFAULT_SHARE: Final = 4
"""By default the cache takes one part in so many of the free memory…"""
_DEFAULT_LIMIT: Final = 4 << 30
"""…but no more bytes than this."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The outcome, in blocks, tokens and bytes."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_cache_bytes: int
    activation_bytes: int
    """At the largest step: its tokens' activations, a gathered context, logits."""


def plan_memory(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig, free_bytes: int) -> MemoryPlan:
    """free_bytes: what is left after the weights are loaded (`free_memory`).

    Raises ConfigError naming the setting that does not fit and what to set instead.
    """
    cache = config.cache
    if cache.block_size < 1:
        raise ConfigError("block_size", f"must be at least 1, is {cache.block_size}")
    per_block = block_bytes(spec, cache.block_size, dtype)
    activation_bytes = _activation_bytes(spec, dtype, config)
    num_blocks = _num_blocks(cache, per_block, activation_bytes, free_bytes)
    kv_cache_bytes = num_blocks * per_block
    if kv_cache_bytes + activation_bytes > free_bytes:
        raise ConfigError(
            "num_gpu_blocks_override" if cache.num_gpu_blocks_override else "kv_cache_memory_bytes",
            f"the KV cache needs {_mib(kv_cache_bytes)} and a step up to {_mib(activation_bytes)}, but only "
            f"{_mib(free_bytes)} are free; make the cache smaller, or lower max_num_batched_tokens or max_num_seqs",
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=_max_model_len(spec, config, num_blocks * cache.block_size),
        kv_cache_bytes=kv_cache_bytes,
        activation_bytes=activation_bytes,
    )


def _num_blocks(cache: CacheConfig, per_block: int, activation_bytes: int, free_bytes: int) -> int:
    if cache.num_gpu_blocks_override is not None:
        if cache.num_gpu_blocks_override < 1:
            raise ConfigError("num_gpu_blocks_override", "must be at least 1")
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        wanted = cache.kv_cache_memory_bytes
    else:
        wanted = min(free_bytes // _DEFAULT_SHARE, free_bytes - activation_bytes, _DEFAULT_LIMIT)
    if wanted < per_block:
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"{max(0, wanted)} bytes hold no block: one of {cache.block_size} tokens takes {per_block} bytes; "
            "give the cache more memory, free some, or lower block_size",
        )
    return wanted // per_block


def _max_model_len(spec: ModelSpec, config: EngineConfig, pool_tokens: int) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return min(spec.max_position, pool_tokens)
    if wanted < 2:
        raise ConfigError("max_model_len", f"must be at least 2 (one token in, one out), is {wanted}")
    if wanted > spec.max_position:
        raise ConfigError(
            "max_model_len", f"{wanted} is beyond the {spec.max_position} positions the model was made for"
        )
    if wanted > pool_tokens:
        raise ConfigError(
            "max_model_len",
            f"{wanted} tokens do not fit the KV cache, which holds {pool_tokens}; "
            f"set it to at most {pool_tokens} or raise kv_cache_memory_bytes",
        )
    return wanted


def _activation_bytes(spec: ModelSpec, dtype: torch.dtype, config: EngineConfig) -> int:
    """Peak of a step's tensors, whatever the cache's size."""
    scheduler = config.scheduler
    num_tokens = padded_num_tokens(scheduler.step_tokens)
    query_size = spec.num_heads * spec.head_dim
    kv_size = 2 * spec.num_kv_heads * spec.head_dim
    per_token = 4 * spec.hidden_size + 2 * (query_size + kv_size) + 2 * query_size
    feed_forward = 4 * spec.intermediate_size * min(num_tokens, MAX_TOKENS_AT_ONCE)
    longest_context = kv_size * min(spec.max_position, config.model.max_model_len or spec.max_position)
    logits = 2 * padded_num_tokens(scheduler.max_num_seqs) * spec.vocab_size * 4
    return (num_tokens * per_token + feed_forward + longest_context) * dtype.itemsize + logits


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    candidates = [_available_in_machine()]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        candidates.append(max(0, limit - used + _reclaimable(group / "memory.stat")))
    except (OSError, ValueError):
        pass  # no control group with a limit
    return min(candidates)


def _available_in_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _reclaimable(stat: Path) -> int:
    """Page cache of the control group: counted as used, given back on demand."""
    for line in stat.read_text().splitlines():
        name, value = line.split()
        if name == "inactive_file":
            return int(value)
    return 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
