"""How many KV blocks, and how long a context, fit beside everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oneloop.config import size_as_text
from oneloop.errors import ConfigError
from oneloop.worker.memory.cpu import cpu_reserved, default_kv_bytes
from oneloop.worker.memory.gpu import gpu_reserved
from oneloop.worker.memory.ledger import DeviceMemory, MemoryLedger, MemoryPlan, MemoryPlanError
from oneloop.worker.memory.remedies import Case, MisfitError, Problem, remedies
from oneloop.worker.memory.sizes import ITEM_BYTES, block_bytes, kv_item_bytes

if TYPE_CHECKING:
    from oneloop.config import DtypeName, EngineConfig
    from oneloop.formats.model_spec import ModelSpec


def plan_memory(spec: ModelSpec, dtype: DtypeName, config: EngineConfig, memory: DeviceMemory) -> MemoryPlan:
    """memory: as it is before the weights are loaded (`free.machine_memory`, `device.nvml.first_gpu`).

    The device is config.resolved's. Raises ConfigError for a context that the model was not made for, and for a fixed
    order that it cannot have; MemoryPlanError naming the setting that does not fit, and what would.
    """
    given = config.model.max_model_len
    if isinstance(given, int) and given > spec.max_position:
        raise ConfigError(
            "max_model_len", f"{given} is beyond the {spec.max_position} positions the model was made for"
        )
    case = Case(dtype=dtype, config=config, memory=memory)
    try:
        return _plan(spec, case)
    except MisfitError as misfit:
        found = remedies(misfit.problem, case, lambda other: _fits(spec, other))
        raise MemoryPlanError(misfit.field, f"{misfit.fact}; {found}", misfit.ledger) from None


def _fits(spec: ModelSpec, case: Case) -> bool:
    try:
        _plan(spec, case)
    except MisfitError:
        return False
    return True


def _plan(spec: ModelSpec, case: Case) -> MemoryPlan:
    """Raises MisfitError."""
    config, memory = case.config, case.memory
    item_bytes = ITEM_BYTES[case.dtype]
    if config.resolved.device == "cuda":
        reserved = gpu_reserved(spec, item_bytes, config)
        usable = min(int(config.cache.gpu_memory_utilization * memory.total), memory.free)
    else:
        reserved = cpu_reserved(spec, item_bytes, config)
        usable = memory.free
    block_size = config.resolved.block_size
    per_block = block_bytes(spec, block_size, kv_item_bytes(config, item_bytes))
    ledger = MemoryLedger(
        device=config.resolved.device, memory=memory, usable=usable, reserved=reserved, kv_cache=0
    )
    num_blocks = _num_blocks(config, per_block, ledger)
    ledger = replace(ledger, kv_cache=num_blocks * per_block)
    _refuse_what_is_not_there(config, per_block, ledger)
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        narrow_kv=config.cache.kv_cache_dtype != "auto",
        max_model_len=_max_model_len(spec, config, num_blocks, per_block, ledger),
        ledger=ledger,
    )


def _num_blocks(config: EngineConfig, per_block: int, ledger: MemoryLedger) -> int:
    cache, reserved, usable = config.cache, ledger.reserved, ledger.usable
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        if cache.kv_cache_memory_bytes < per_block:
            given, block_size = size_as_text(cache.kv_cache_memory_bytes), config.resolved.block_size
            raise MisfitError(
                "kv_cache_memory_bytes",
                f"{given} hold no block: one of {block_size} tokens takes {_needed(per_block)}",
                Problem(least_blocks=1, per_block=per_block),
                ledger,
            )
        return cache.kv_cache_memory_bytes // per_block
    if config.resolved.device == "cuda":
        wanted, field = usable - reserved.bytes, "gpu_memory_utilization"
    else:
        free = usable - reserved.weights
        wanted, field = default_kv_bytes(free, reserved.bytes - reserved.weights), "kv_cache_memory_bytes"
    if wanted < per_block:
        raise MisfitError(
            field,
            f"no memory is left for the KV cache: of {size_as_text(usable)} usable the weights take "
            f"{_needed(reserved.weights)} and everything else {_needed(reserved.bytes - reserved.weights)}",
            Problem(per_block=per_block),
            ledger,
        )
    return wanted // per_block


def _refuse_what_is_not_there(config: EngineConfig, per_block: int, ledger: MemoryLedger) -> None:
    """A cache whose size was given may not fit."""
    reserved, free = ledger.reserved, ledger.memory.free
    if ledger.planned <= free:
        return
    raise MisfitError(
        "num_gpu_blocks_override" if config.cache.num_gpu_blocks_override else "kv_cache_memory_bytes",
        f"the KV cache needs {_needed(ledger.kv_cache)}, the weights {_needed(reserved.weights)} and everything else "
        f"up to {_needed(reserved.bytes - reserved.weights)}, but only {size_as_text(free)} are free",
        Problem(most_blocks=(free - reserved.bytes) // per_block, per_block=per_block),
        ledger,
    )


def _max_model_len(
    spec: ModelSpec, config: EngineConfig, num_blocks: int, per_block: int, ledger: MemoryLedger
) -> int:
    given = config.model.max_model_len
    block_size = config.resolved.block_size
    pool_tokens = num_blocks * block_size
    if given == "auto":
        return min(spec.max_position, pool_tokens)
    wanted = spec.max_position if given is None else given
    if wanted > pool_tokens:
        whose = "the model's own" if given is None else "set"
        raise MisfitError(
            "max_model_len",
            f"the context of {wanted} tokens ({whose}) does not fit the KV cache, which holds {pool_tokens}",
            Problem(longest=pool_tokens, least_blocks=-(-wanted // block_size), per_block=per_block),
            ledger,
        )
    return wanted


def _needed(num_bytes: int) -> str:
    return size_as_text(num_bytes, round_up=True)
