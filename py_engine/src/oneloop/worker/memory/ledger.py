"""The ledger: bytes by purpose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from oneloop.device.detect import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU, or of the machine, before anything of the model is loaded."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Bytes by purpose, all but the KV cache. An item that a device does not have is 0."""

    context: int = 0
    """The driver's context and the code of the kernels."""
    weights: int
    activations: int
    """Tensors between the layers at the largest step."""
    logits: int
    workspaces: int = 0
    """What attention and matrix products need for themselves."""
    step_buffers: int = 0
    """The slab on the device, the step's inputs made from it, block tables."""
    sampler: int = 0
    """Parameters and penalty counts per slot, scratch."""
    graphs: int = 0
    """Captured graphs, beside the tensors that they share with steps launched one by one."""
    slack: int = 0
    """What the allocator loses to its rounding."""

    def items(self) -> dict[str, int]:
        """Item → bytes."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.items().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """How a device's memory is shared out."""

    device: DeviceKind
    memory: DeviceMemory
    usable: int
    """What the engine may take, all in all."""
    reserved: Reserved
    kv_cache: int

    @property
    def planned(self) -> int:
        """Everything the engine allocates."""
        return self.reserved.bytes + self.kv_cache

    @property
    def left(self) -> int:
        """Bytes that are usable and not planned for."""
        return self.usable - self.planned


class MemoryPlanError(ConfigError):
    """Settings that do not fit the device. `ledger`: how far the plan came; its KV cache is 0 where none fits."""

    def __init__(self, field: str, message: str, ledger: MemoryLedger) -> None:
        super().__init__(field, message)
        self.ledger = ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The outcome: what the worker allocates."""

    num_blocks: int
    block_size: int
    max_model_len: int
    ledger: MemoryLedger
    narrow_kv: bool = False
    """Whether keys and values are kept in 8 bits, else in the model's type."""

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.ledger.kv_cache

    @property
    def pool_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    def concurrency(self, num_tokens: int) -> int:
        """How many sequences of that length the KV cache holds at once."""
        return self.num_blocks // -(-num_tokens // self.block_size)
