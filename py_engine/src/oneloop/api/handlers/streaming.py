"""A streamed reply. Its task starts it and ends it; in between the outbox sends what comes, without waking the task.

While the client reads slowly the task waits for the socket and nothing is taken: the streams merge what comes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from oneloop.api.errors import INTERNAL_MESSAGE, ApiError, ErrorKind
from oneloop.api.handlers.generation import check_delta
from oneloop.api.state import REQUEST_ID, STATE
from oneloop.api.stream import SseWriter
from oneloop.engine.outputs import SequenceDelta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

    from oneloop.api.chunks import ChunkEncoder
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.engine.stream import RequestStream

log = logging.getLogger(__name__)


async def stream_reply(
    request: web.Request,
    streams: Sequence[RequestStream],
    encoder: ChunkEncoder,
    usage: Usage,
    options: StreamOptions,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send what the streams bring as it comes. The status is decided with the first of it; a later failure is an event.

    streams: one per prompt; none means a request for no tokens. usage: filled in by the end.
    """
    state = request.app[STATE]
    writer = SseWriter(request, headers, state.config.write_timeout_s)
    try:
        if streams:
            last = await _Reply(state, writer, streams, encoder, usage).until_last()
        else:
            last = _nothing_generated(encoder)
        if not writer.started:
            await writer.start()
    except ConnectionError:
        raise
    except Exception as error:
        if not writer.started:
            raise
        if isinstance(error, ApiError):
            return await writer.fail(error)
        log.error("request %s failed while it was streamed", request[REQUEST_ID], exc_info=error)
        return await writer.fail(ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE))
    return await writer.done(last + encoder.usage_event() if options.include_usage else last)


def _nothing_generated(encoder: ChunkEncoder) -> bytes:
    """The events of a request for no tokens."""
    choices = range(encoder.num_choices)
    ends = [SequenceDelta(choice, "", [], None, "length") for choice in choices]
    return b"".join([encoder.encode(delta.index, delta) for delta in ends])


class _Reply:
    """Stands between a request's streams, the outbox and the reply's task.

    The turn is the outbox's while the task waits in `_hand_over`, and the task's otherwise: then nothing is taken. What
    runs per token touches few objects: with hundreds of clients each of them is a miss of the processor's cache.
    """

    __slots__ = (
        "_encoder", "_handed", "_has_news", "_n", "_num_open", "_outbox", "_state", "_streams", "_usage", "_writer",
    )  # fmt: skip

    def __init__(
        self,
        state: ApiState,
        writer: SseWriter,
        streams: Sequence[RequestStream],
        encoder: ChunkEncoder,
        usage: Usage,
    ) -> None:
        self._state = state
        self._outbox = state.outbox
        self._writer = writer
        self._streams = tuple(streams)
        self._encoder = encoder
        self._usage = usage
        self._num_open = encoder.num_choices
        self._n = encoder.num_choices // len(streams)
        self._has_news = False
        """Whether a stream has told of something that was not taken yet."""
        self._handed: asyncio.Future[bytes] | None = None
        """While the turn is the outbox's: where it puts what the task is to send."""

    async def until_last(self) -> bytes:
        """Start the reply, send everything but the last events and return those. ApiError when a sequence failed."""
        for stream in self._streams:
            stream.call_on_news(self._note_news)
        try:
            while True:
                events = await self._hand_over()
                if not self._num_open:
                    self._count()
                    return events
                if not self._writer.started:
                    await self._writer.start()
                await self._writer.send(events)
        finally:
            # Else the two would wait for the collector, with all that hangs on them: requests, replies, prompts.
            for stream in self._streams:
                stream.call_on_news(None)

    async def _hand_over(self) -> bytes:
        """Leave the turn to the outbox until the task is needed: for the start, a slow reader, the end or an error."""
        handed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._handed = handed
        if self._has_news:
            self._outbox.post(self)
        else:
            self._relay()
        try:
            return await handed
        finally:
            self._handed = None

    def _note_news(self, _: RequestStream) -> None:
        """A stream has something again."""
        if not self._has_news:
            self._has_news = True
            if self._handed is not None:
                self._outbox.post(self)

    def send_news(self) -> None:
        """Take, encode and write; or give the turn to the task."""
        handed = self._handed
        if handed is None:
            return
        fault: Exception | None = None
        left = b""
        try:
            if self._write_unsent():
                events = self._take()
                if not self._num_open or (events and not self._writer.started):
                    left = events
                elif not events or self._writer.write(events):
                    self._relay()
                    return
        except Exception as error:  # whatever it is, it is this reply's alone
            fault = error
        self._handed = None
        if handed.done():  # cancelled: the client has left
            return
        if fault is None:
            handed.set_result(left)
        else:
            handed.set_exception(fault)

    def _relay(self) -> None:
        """Let the text of a plain reply go to the socket without us, until something else is to be told."""
        if self._encoder.num_choices > 1 or not self._writer.started:
            return
        affixes, fd = self._encoder.text_affixes(0), self._writer.socket_fd
        if affixes is not None and fd is not None:
            self._streams[0].relay_text(fd, *affixes, chunked=self._writer.is_chunked)

    def _write_unsent(self) -> bool:
        """What the relay left goes first. False: the socket must become writable before anything is taken."""
        unsent = b"".join([stream.take_unsent() for stream in self._streams])
        return not unsent or self._writer.write_framed(unsent)

    def _take(self) -> bytes:
        """The events of everything new. ApiError when a sequence failed."""
        self._has_news = False
        encoder, parts, first_choice = self._encoder, [], 0
        if encoder.continuous_usage:
            self._count()
        for stream in self._streams:
            for added in stream.take():
                if added.finish_reason is not None:
                    check_delta(self._state, added)
                    self._num_open -= 1
                parts.append(encoder.encode(first_choice + added.index, added))
            first_choice += self._n
        return b"".join(parts)

    def _count(self) -> None:
        """Bring the usage up to what the streams have brought."""
        self._usage.completion_tokens = sum(stream.num_generated_tokens for stream in self._streams)
        self._usage.cached_tokens = sum(stream.num_cached_tokens for stream in self._streams)
