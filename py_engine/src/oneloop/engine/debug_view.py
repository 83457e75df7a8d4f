"""What runs, what waits and why, as one value for JSON (/debug/scheduler). Bounded in size; shows no text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.engine.stream import RequestStream
    from oneloop_core import Core
    from oneloop_core.snapshot import RunningSequence, WaitingSequence

MAX_SEQUENCES: Final = 100
"""Running and waiting sequences that are listed, each."""
MAX_LETTERS: Final = 1024
"""Of the map of blocks."""


def scheduler_view(core: Core, streams: Mapping[int, RequestStream]) -> dict[str, Any]:
    """streams: live requests by handle, for their ids.

    It costs the loop about half a millisecond when the lists are full.
    """
    stats, snapshot = core.stats(), core.snapshot(MAX_SEQUENCES, MAX_LETTERS)

    def named(sequence: RunningSequence | WaitingSequence) -> dict[str, Any]:
        stream = streams.get(sequence["request"])
        return {"request_id": None if stream is None else stream.request_id, **sequence}

    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_steps": stats.num_steps,
        "num_steps_in_flight": stats.num_steps_in_flight,
        "num_preemptions": stats.num_preemptions,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_generation_tokens": stats.num_generation_tokens,
        "kv": {
            "block_size": core.config.block_size,
            "num_blocks": stats.num_total_blocks,
            "num_free": stats.num_free_blocks,
            "num_cached": stats.num_cached_blocks,
            "num_used": stats.num_used_blocks,
            "map": snapshot["kv_map"],
            "blocks_per_letter": snapshot["blocks_per_letter"],
            "letters": {".": "free", "c": "cached", "u": "used", "s": "used by several"},
        },
        "steps": snapshot["steps"],
        "running": [named(sequence) for sequence in snapshot["running"]],
        "waiting": [named(sequence) for sequence in snapshot["waiting"]],
    }
