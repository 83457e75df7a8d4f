"""A streamed reply through aiohttp: for whatever request; a plain one goes without its machinery (express.py).

Its task starts it and ends it; in between the outbox sends what comes, without waking the task. While the client reads
slowly the task waits for the socket.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from oneloop.api.errors import INTERNAL_MESSAGE, ApiError, ErrorKind
from oneloop.api.prompt_logprobs import encode_echoes
from oneloop.api.sender import StreamSender
from oneloop.api.state import REQUEST_ID, STATE
from oneloop.api.stream import SseWriter
from oneloop.engine.outputs import SequenceDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from oneloop.api.encoder import EventEncoder
    from oneloop.api.handlers.generation import Job
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream

log = logging.getLogger(__name__)


async def stream_reply(
    request: web.Request, streams: Sequence[RequestStream], job: Job
) -> web.StreamResponse:
    """Send what the streams bring as it comes. The status is decided with the first of it; a later failure is an event.

    streams: one per prompt; none means a request for no tokens.
    """
    state = request.app[STATE]
    await begin_echo(job, streams)
    encoder = job.make_encoder()
    writer = SseWriter(request, job.headers, state.config.write_timeout_s)
    try:
        if streams:
            last = await _until_last(state, writer, streams, encoder, job.usage)
        else:
            last = nothing_generated(encoder)
        if not writer.started:
            await writer.start()
    except ConnectionError:
        raise
    except Exception as error:
        if not writer.started:
            raise
        return await writer.end(encoder.failure(told_under_way(error, request[REQUEST_ID])))
    return await writer.end(last + encoder.closing())


async def begin_echo(job: Job, streams: Sequence[RequestStream]) -> None:
    """Before the first event: where prompts are echoed with their log-probabilities, wait until these are known."""
    scores = job.prompt_scores
    if scores is not None and scores.echoed and job.logprobs is not None and streams:
        await encode_echoes(scores, streams, job.logprobs)


def told_under_way(error: Exception, request_id: str) -> ApiError:
    """What the client is told once the reply has begun; our own bugs go to the log in full."""
    if isinstance(error, ApiError):
        return error
    log.error("request %s failed while it was streamed", request_id, exc_info=error)
    return ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE)


def nothing_generated(encoder: EventEncoder) -> bytes:
    """The events of a request for no tokens."""
    choices = range(encoder.num_choices)
    ends = [SequenceDelta(choice, "", [], None, "length") for choice in choices]
    return b"".join([encoder.encode(delta.index, delta) for delta in ends])


async def _until_last(
    state: ApiState, writer: SseWriter, streams: Sequence[RequestStream], encoder: EventEncoder, usage: Usage
) -> bytes:
    """Start the reply, send everything but the last events and return those. ApiError when a sequence failed."""
    loop = asyncio.get_running_loop()
    handed: asyncio.Future[bytes] = loop.create_future()

    def take_turn(events: bytes, fault: Exception | None) -> None:
        if handed.done():  # cancelled: the client has left
            return
        if fault is None:
            handed.set_result(events)
        else:
            handed.set_exception(fault)

    sender = StreamSender(state, writer, streams, encoder, usage, take_turn)
    try:
        while True:
            handed = loop.create_future()
            sender.leave_to_outbox()
            events = await handed
            if sender.all_ended:
                sender.count_usage()
                return events
            if not writer.started:
                await writer.start()
            await writer.send(events)
    finally:
        sender.stop()
