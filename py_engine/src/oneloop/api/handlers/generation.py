"""What chat and completions share: queueing prompts, adding up a whole reply, telling what a sequence's end means."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oneloop.api.errors import GENERATION_FAILED, ApiError, ErrorKind
from oneloop.api.replies import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.protocol.sampling import Scheduling
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.engine.outputs import Added
    from oneloop.engine.params import ResolvedParams
    from oneloop.engine.stream import RequestStream

log = logging.getLogger(__name__)


async def submit_all(
    state: ApiState,
    streams: list[RequestStream],
    prompts: Sequence[tuple[list[int], ResolvedParams]],
    scheduling: Scheduling,
) -> None:
    """Queue the prompts; `streams` gets theirs as they come, and is the caller's to end with `abort_all`."""
    for token_ids, params in prompts:
        stream = await state.engine.submit(
            token_ids, params, priority=scheduling.priority, cache_salt=scheduling.cache_salt
        )
        streams.append(stream)


def abort_all(streams: Sequence[RequestStream]) -> None:
    """End what has not ended: whoever asked for it has its answer, or is gone."""
    for stream in streams:
        stream.abort()


async def collect(state: ApiState, streams: Sequence[RequestStream], n: int, usage: Usage) -> list[Choice]:
    """All choices, once every sequence has ended; wakes once per prompt. ApiError when a sequence failed."""
    choices = [Choice() for _ in range(len(streams) * n)]
    for prompt, stream in enumerate(streams):
        for delta in await stream.all_deltas():
            check_delta(state, delta)
            choices[prompt * n + delta.index].add(delta)
            usage.completion_tokens += len(delta.token_ids)
        usage.cached_tokens += stream.num_cached_tokens
    return choices


def check_delta(state: ApiState, delta: Added) -> None:
    """Raise what a sequence that did not end by itself means for its client."""
    if delta.finish_reason == "error":
        log.error("generation failed: %s", delta.error)
        if state.engine.health().ok:
            raise ApiError(ErrorKind.INTERNAL, GENERATION_FAILED)
        raise ApiError(ErrorKind.UNAVAILABLE, "The engine has stopped before the answer was complete.")
    if delta.finish_reason == "abort" and not state.engine.health().ok:
        raise ApiError(ErrorKind.UNAVAILABLE, "The server was shut down before the answer was complete.")
