"""Between a reply's streams and its connection: takes what comes when the outbox says so, encodes and writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop.api.handlers.generation import check_delta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.api.encoder import EventEncoder
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.api.stream import EventWriter
    from oneloop.engine.stream import RequestStream


class StreamSender:
    """Stands between a request's streams, the outbox and the reply's owner.

    The turn is the outbox's from `leave_to_outbox()` on, until the owner is needed: for the start, a slow reader, the
    end or an error. While it is the owner's nothing is taken: the streams merge what comes. What runs per token touches
    few objects: with hundreds of clients each of them is a miss of the processor's cache.
    """

    __slots__ = (
        "_encoder", "_has_news", "_has_turn", "_n", "_num_open", "_on_turn", "_outbox", "_state", "_streams", "_usage",
        "_writer",
    )  # fmt: skip

    def __init__(
        self,
        state: ApiState,
        writer: EventWriter,
        streams: Sequence[RequestStream],
        encoder: EventEncoder,
        usage: Usage,
        on_turn: Callable[[bytes, Exception | None], None],
    ) -> None:
        """streams: one per prompt, at least one. usage: filled in by the end.

        on_turn: the owner has the turn again, with the events it is to write, or with what went wrong: an ApiError when
        a sequence failed, ConnectionError when the client is gone, else a bug. It must not raise.
        """
        self._state = state
        self._outbox = state.outbox
        self._writer = writer
        self._streams = tuple(streams)
        self._encoder = encoder
        self._usage = usage
        self._on_turn = on_turn
        self._num_open = encoder.num_choices
        self._n = encoder.num_choices // len(streams)
        self._has_news = False
        """Whether a stream has told of something that was not taken yet."""
        self._has_turn = False
        """Whether the turn is the outbox's."""
        for stream in self._streams:
            stream.call_on_news(self._note_news)

    @property
    def all_ended(self) -> bool:
        """Whether the last events of every choice were taken."""
        return not self._num_open

    def leave_to_outbox(self) -> None:
        """Give the turn to the outbox."""
        self._has_turn = True
        if self._has_news:
            self._outbox.post(self)
        else:
            self._relay()

    def stop(self) -> None:
        """Neither take nor tell any more.

        Else reply and streams would wait for the collector, with all that hangs on them: requests, prompts.
        """
        self._has_turn = False
        for stream in self._streams:
            stream.call_on_news(None)

    def send_news(self) -> None:
        """Take, encode and write; or give the turn to the owner."""
        if not self._has_turn:
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
        self._has_turn = False
        self._on_turn(left, fault)

    def count_usage(self) -> None:
        """Bring the usage up to what the streams have brought."""
        self._usage.completion_tokens = sum(stream.num_generated_tokens for stream in self._streams)
        self._usage.cached_tokens = sum(stream.num_cached_tokens for stream in self._streams)

    def _note_news(self, _: RequestStream) -> None:
        """A stream has something again."""
        if not self._has_news:
            self._has_news = True
            if self._has_turn:
                self._outbox.post(self)

    def _relay(self) -> None:
        """Let the text of a plain reply go to the socket without us, until something else is to be told."""
        if self._encoder.num_choices > 1 or not self._writer.started:
            return
        if self._encoder.continuous_usage:
            self.count_usage()
        frame, fd = self._encoder.text_frame(0), self._writer.socket_fd
        if frame is not None and fd is not None:
            self._streams[0].relay_text(fd, frame, chunked=self._writer.is_chunked)

    def _write_unsent(self) -> bool:
        """What the relay left goes first. False: the socket must become writable before anything is taken."""
        unsent = b"".join([stream.take_unsent() for stream in self._streams])
        return not unsent or self._writer.write_framed(unsent)

    def _take(self) -> bytes:
        """The events of everything new. ApiError when a sequence failed."""
        self._has_news = False
        encoder, parts, first_choice = self._encoder, [], 0
        if encoder.continuous_usage:
            self.count_usage()
        for stream in self._streams:
            for added in stream.take():
                if added.finish_reason is not None:
                    check_delta(self._state, stream, added)
                    self._num_open -= 1
                parts.append(encoder.encode(first_choice + added.index, added))
            first_choice += self._n
        return b"".join(parts)
