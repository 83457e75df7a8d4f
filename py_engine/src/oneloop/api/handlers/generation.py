"""What chat and completions share: queueing prompts, adding up a whole reply, streaming one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

from oneloop.api.errors import GENERATION_FAILED, ApiError, ErrorKind
from oneloop.api.replies import Choice
from oneloop.api.state import STATE
from oneloop.api.stream import SseWriter
from oneloop.engine.outputs import SequenceDelta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
    from contextlib import AsyncExitStack

    from aiohttp import web

    from oneloop.api.chunks import ChunkEncoder
    from oneloop.api.protocol.sampling import Scheduling, StreamOptions
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.engine.params import SamplingParams
    from oneloop.engine.stream import RequestStream

Step: TypeAlias = "list[tuple[int, SequenceDelta]]"

log = logging.getLogger(__name__)


async def submit_all(
    state: ApiState,
    stack: AsyncExitStack,
    prompts: Sequence[tuple[list[int], SamplingParams]],
    scheduling: Scheduling,
) -> list[RequestStream]:
    """Queue the prompts. Leaving the stack, in whatever way, aborts what has not ended."""
    streams = []
    for token_ids, params in prompts:
        stream = await state.engine.submit(
            token_ids, params, priority=scheduling.priority, cache_salt=scheduling.cache_salt
        )
        streams.append(await stack.enter_async_context(stream))
    return streams


async def steps(
    state: ApiState, streams: Sequence[RequestStream], n: int, usage: Usage
) -> AsyncGenerator[Step]:
    """What every step brings, as (choice, delta); counts it into `usage`. ApiError when a sequence failed."""
    if len(streams) == 1:
        # The usual case, at every token of every client: nothing stands between it and the stream.
        stream = streams[0]
        async for deltas in stream:
            usage.cached_tokens = stream.num_cached_tokens
            for delta in deltas:
                if delta.finish_reason is not None:
                    _check_delta(state, delta)
                usage.completion_tokens += len(delta.token_ids)
            yield [(delta.index, delta) for delta in deltas]
        return
    async with aclosing(_merged(streams)) as batches:
        async for batch in batches:
            usage.cached_tokens = sum(stream.num_cached_tokens for stream in streams)
            for _, delta in batch:
                _check_delta(state, delta)
                usage.completion_tokens += len(delta.token_ids)
            yield [(prompt * n + delta.index, delta) for prompt, delta in batch]


async def nothing_to_generate(num_choices: int) -> AsyncGenerator[Step]:
    """The one step of a request for no tokens."""
    yield [
        (choice, SequenceDelta(choice, "", [], None, "length", None, None)) for choice in range(num_choices)
    ]


async def collect(state: ApiState, streams: Sequence[RequestStream], n: int, usage: Usage) -> list[Choice]:
    """All choices, once every sequence has ended; wakes once per prompt. ApiError when a sequence failed."""
    choices = [Choice() for _ in range(len(streams) * n)]
    for prompt, stream in enumerate(streams):
        for delta in await stream.all_deltas():
            _check_delta(state, delta)
            choices[prompt * n + delta.index].add(delta)
            usage.completion_tokens += len(delta.token_ids)
        usage.cached_tokens += stream.num_cached_tokens
    return choices


async def stream_reply(
    request: web.Request,
    source: AsyncIterator[Step],
    encoder: ChunkEncoder,
    options: StreamOptions,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the steps as they come. The status is decided with the first of them; a later failure is an event."""
    writer = SseWriter(request, headers, request.app[STATE].config.write_timeout_s)
    started = False
    try:
        async for step in source:
            if len(step) == 1:
                events = encoder.encode(*step[0])
            else:
                events = b"".join([encoder.encode(choice, delta) for choice, delta in step])
            if events and not started:
                await writer.start()
                started = True
            if events:
                await writer.send(events)
    except ApiError as error:
        if not started:
            raise
        return await writer.fail(error)
    if options.include_usage:
        await writer.send(encoder.usage_event())
    return await writer.done()


def _check_delta(state: ApiState, delta: SequenceDelta) -> None:
    """Raise what a sequence that did not end by itself means for its client."""
    if delta.finish_reason == "error":
        log.error("generation failed: %s", delta.error)
        if state.engine.health().ok:
            raise ApiError(ErrorKind.INTERNAL, GENERATION_FAILED)
        raise ApiError(ErrorKind.UNAVAILABLE, "The engine has stopped before the answer was complete.")
    if delta.finish_reason == "abort" and not state.engine.health().ok:
        raise ApiError(ErrorKind.UNAVAILABLE, "The server was shut down before the answer was complete.")


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[Step]:
    """What is new in any of the streams, as (position of the stream, delta); ends when all have."""
    waits = {asyncio.create_task(stream.next_deltas()): index for index, stream in enumerate(streams)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            batch: Step = []
            for index, task in sorted((waits.pop(task), task) for task in done):
                deltas = task.result()
                if deltas:
                    batch += [(index, delta) for delta in deltas]
                    waits[asyncio.create_task(streams[index].next_deltas())] = index
            if batch:
                yield batch
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
