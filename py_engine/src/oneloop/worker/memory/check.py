"""One real step against the plan."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from oneloop.errors import ConfigError

if TYPE_CHECKING:
    from oneloop.worker.memory.ledger import MemoryPlan

log = logging.getLogger(__name__)

TOLERANCE: Final = 0.02
"""Part of the planned bytes that a measurement may be above or below without a word."""


def check_peak(plan: MemoryPlan, free_after: int, later: int = 0) -> int:
    """Compare what is taken after the largest step with the plan. Returns the bytes taken, `later` included.

    free_after: free bytes of the device once the KV cache is allocated and the largest step has run (the allocator
    keeps what it took, so that this is the peak). later: bytes of what is planned and comes when nobody waits. Logs a
    warning when that is not about what was planned. ConfigError, with the utilization to set, when it is more, and less
    is left free than gpu_memory_utilization leaves to others.
    """
    ledger = plan.ledger
    taken = ledger.memory.free - free_after + later
    excess = taken - ledger.planned
    if taken > ledger.usable and excess > TOLERANCE * ledger.planned:
        fitting = (2 * ledger.usable - taken) / ledger.memory.total
        raise ConfigError(
            "gpu_memory_utilization",
            f"the largest step takes {_gib(taken)}, {_gib(excess)} more than planned and {_gib(taken - ledger.usable)} "
            f"more than may be used; set it to at most {max(0.01, int(fitting * 100) / 100):.2f}, or lower "
            "max_num_batched_tokens or max_num_seqs",
        )
    if abs(excess) > TOLERANCE * ledger.planned:
        log.warning(
            "memory: the largest step takes %s, the plan says %s (%+.1f %%)",
            _gib(taken), _gib(ledger.planned), 100 * excess / ledger.planned,
        )  # fmt: skip
    return taken


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
