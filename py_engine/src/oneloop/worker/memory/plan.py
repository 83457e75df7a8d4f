"""How many KV blocks, and how long a context, fit beside everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oneloop.errors import ConfigError
from oneloop.worker.memory.cpu import cpu_reserved, default_kv_bytes
from oneloop.worker.memory.gpu import gpu_reserved
from oneloop.worker.memory.ledger import DeviceMemory, MemoryLedger, MemoryPlan, Reserved
from oneloop.worker.memory.sizes import ITEM_BYTES, block_bytes

if TYPE_CHECKING:
    from oneloop.config import DtypeName, EngineConfig
    from oneloop.formats.model_spec import ModelSpec

_MIB: Final = 1 << 20
_SMALLER_STEP: Final = "lower max_num_batched_tokens or max_num_seqs"


def plan_memory(spec: ModelSpec, dtype: DtypeName, config: EngineConfig, memory: DeviceMemory) -> MemoryPlan:
    """memory: as it is before the weights are loaded (`free.machine_memory`, `device.nvml.first_gpu`).

    The device is config.resolved's. Raises ConfigError naming the setting that does not fit and what to set instead.
    """
    item_bytes = ITEM_BYTES[dtype]
    if config.resolved.device == "cuda":
        reserved = gpu_reserved(spec, item_bytes, config)
        usable = min(int(config.cache.gpu_memory_utilization * memory.total), memory.free)
    else:
        reserved = cpu_reserved(spec, item_bytes, config)
        usable = memory.free
    block_size = config.resolved.block_size
    per_block = block_bytes(spec, block_size, item_bytes)
    num_blocks = _num_blocks(config, per_block, usable, reserved)
    kv_cache = num_blocks * per_block
    _refuse_what_is_not_there(config, kv_cache, reserved, memory.free)
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=_max_model_len(spec, config, num_blocks * block_size, per_block // block_size),
        ledger=MemoryLedger(
            device=config.resolved.device, memory=memory, usable=usable, reserved=reserved, kv_cache=kv_cache
        ),
    )


def _num_blocks(config: EngineConfig, per_block: int, usable: int, reserved: Reserved) -> int:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        wanted, field = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif config.resolved.device == "cuda":
        wanted, field = usable - reserved.bytes, "gpu_memory_utilization"
    else:
        free = usable - reserved.weights
        wanted, field = default_kv_bytes(free, reserved.bytes - reserved.weights), "kv_cache_memory_bytes"
    if wanted >= per_block:
        return wanted // per_block
    if field == "kv_cache_memory_bytes" and cache.kv_cache_memory_bytes is not None:
        raise ConfigError(
            field,
            f"{wanted} bytes hold no block: one of {config.resolved.block_size} tokens takes {per_block} bytes; "
            "give the cache more memory, or lower block_size",
        )
    raise ConfigError(
        field,
        f"no memory is left for the KV cache: of {_mib(usable)} usable the weights take {_mib(reserved.weights)} and "
        f"everything else {_mib(reserved.bytes - reserved.weights)}; free some memory"
        + (", raise gpu_memory_utilization" if config.resolved.device == "cuda" else "")
        + f", or {_SMALLER_STEP}",
    )


def _refuse_what_is_not_there(config: EngineConfig, kv_cache: int, reserved: Reserved, free: int) -> None:
    """A cache whose size was given may not fit."""
    if kv_cache + reserved.bytes <= free:
        return
    raise ConfigError(
        "num_gpu_blocks_override" if config.cache.num_gpu_blocks_override else "kv_cache_memory_bytes",
        f"the KV cache needs {_mib(kv_cache)}, the weights {_mib(reserved.weights)} and everything else up to "
        f"{_mib(reserved.bytes - reserved.weights)}, but only {_mib(free)} are free; make the cache smaller, or "
        f"{_SMALLER_STEP}",
    )


def _max_model_len(spec: ModelSpec, config: EngineConfig, pool_tokens: int, token_bytes: int) -> int:
    given = config.model.max_model_len
    if given == "auto":
        return min(spec.max_position, pool_tokens)
    wanted = spec.max_position if given is None else given
    if wanted > spec.max_position:
        raise ConfigError(
            "max_model_len", f"{wanted} is beyond the {spec.max_position} positions the model was made for"
        )
    if wanted > pool_tokens:
        whose = "the model's own" if given is None else "set"
        raise ConfigError(
            "max_model_len",
            f"the context of {wanted} tokens ({whose}) does not fit the KV cache, which holds {pool_tokens}; set it "
            f"to auto or at most {pool_tokens}, or give the cache the {wanted * token_bytes} bytes that it needs",
        )
    return wanted


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"
