"""Deltas → SSE bytes. What never changes within a reply is encoded once per choice; a token costs one JSON string.

The only place that knows the shape of a chunk: the relay, which writes most of them, is given a `TextFrame`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from oneloop.api.errors import error_body
from oneloop.api.replies import SYSTEM_FINGERPRINT
from oneloop.engine.relay import TextFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.errors import ApiError
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import ReplyHead, Told, Usage
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added

DONE = b"data: [DONE]\n\n"


def failure(error: ApiError) -> bytes:
    """One error event; no end mark: a reader must not take the text for whole."""
    return event(error_body(error))


def event(value: object) -> bytes:
    """One SSE event holding a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class ChunkFrame:
    """The constant bytes around a choice's payload, and the usage that a chunk carries."""

    def __init__(
        self, head: ReplyHead, kind: str, num_choices: int, options: StreamOptions, usage: Usage
    ) -> None:
        start = orjson.dumps({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self._start = b"data: " + start[:-1] + b',"choices":['
        self.choice_starts = [self._start + b'{"index":%d,' % index for index in range(num_choices)]
        self._usage = usage
        self.continuous = options.continuous_usage
        """Whether every chunk ends in the usage so far."""
        without = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(SYSTEM_FINGERPRINT)
        self._include_usage = options.include_usage
        self._end = b"]" + without
        self._terminal_end = b"]" + self._fingerprint + without

    def end(self, *, terminal: bool = False) -> bytes:
        """What closes the list of choices and the event."""
        if not self.continuous:
            return self._terminal_end if terminal else self._end
        fingerprint = self._fingerprint if terminal else b""
        return b"]" + fingerprint + b',"usage":' + orjson.dumps(self._usage.wire()) + b"}\n\n"

    def running_usage(self) -> tuple[bytes, tuple[bytes, bytes, int, int]]:
        """The end of a chunk with the usage so far: what goes before its numbers that grow, and `TextFrame.usage`."""
        usage, between = self._usage, b',"completion_tokens":'
        grows = b"%d%b%d" % (usage.prompt_tokens + usage.completion_tokens, between, usage.completion_tokens)
        before, _, behind = self.end().partition(grows)
        return before, (between, behind, usage.prompt_tokens, usage.completion_tokens)

    def closing(self) -> bytes:
        """The end mark, behind the chunk with the usage and no choices where one is asked for."""
        if not self._include_usage:
            return DONE
        usage = orjson.dumps(self._usage.wire())
        return self._start + b"]" + self._fingerprint + b',"usage":' + usage + b"}\n\n" + DONE


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a protocol writes the text of a choice."""

    kind: str
    """The `object` of a chunk."""
    text_start: bytes
    text_end: bytes
    no_text: bytes
    """In a last chunk that brings none."""
    tells_within_choice: bool
    """What is told of the prompt stands in the choice, as each may have a prompt of its own."""


CHAT_KIND = "chat.completion.chunk"
_CHAT = _Shape(CHAT_KIND, b'"delta":{"content":', b"}", b'"delta":{}', False)
_COMPLETION = _Shape("text_completion", b'"text":', b"", b'"text":""', True)
ROLE = b'"delta":{"role":"assistant","content":""}'
_LOGPROBS = b',"logprobs":'
_OPEN = b',"finish_reason":null}'


class ChunkEncoder:
    """Turns each choice's deltas into the events of one reply."""

    __slots__ = (
        "_echoes_logprobs",
        "_first",
        "_frame",
        "_logprobs",
        "_openings",
        "_shape",
        "_text_frames",
        "_token_ids",
        "continuous_usage",
        "num_choices",
    )

    def __init__(
        self,
        frame: ChunkFrame,
        shape: _Shape,
        openings: Sequence[bytes],
        logprobs: Sequence[LogprobsEncoder] | None,
        told: Told | None,
        *,
        echoes_logprobs: bool = False,
    ) -> None:
        """openings: per choice the payload of a chunk that goes before its text, or b"". logprobs: one per choice.

        echoes_logprobs: openings have those of the prompt, which the encoders hold already.
        """
        self._echoes_logprobs = echoes_logprobs
        self._token_ids = told is not None and told.token_ids
        self._first = [b""] * len(openings) if told is None else _first_members(told, shape, len(openings))
        self._frame = frame
        self._shape = shape
        self.num_choices = len(openings)
        self.continuous_usage = frame.continuous
        """Whether chunks show the usage, so that it must be right before each."""
        self._openings = list(openings)
        self._logprobs = logprobs
        self._text_frames: list[TextFrame | None] = [None] * len(openings)

    def encode(self, choice: int, delta: Added) -> bytes:
        """The events of this delta: the opening, once; its text, empty while it is held back; the finish reason."""
        frame = self._text_frames[choice]
        if frame is None:
            return self._opening(choice) + self._chunk(choice, delta)
        if frame.logprobs is not None or self.continuous_usage or delta.finish_reason is not None:
            return self._chunk(choice, delta)
        if self._token_ids or self._first[choice]:
            return self._chunk(choice, delta)
        text = delta.text
        return frame.before + orjson.dumps(text) + frame.after if text else b""

    def text_frame(self, choice: int) -> TextFrame | None:
        """What each of this choice's events but the last has around its text and log-probabilities.

        None while the opening is to come. Where chunks show the usage, it must be right, and goes on from there.
        """
        frame = self._text_frames[choice]
        if self._token_ids or self._first[choice]:
            return None
        if frame is None or not self.continuous_usage:
            return frame
        before, usage = self._frame.running_usage()
        return replace(frame, after=frame.after + before, usage=usage)

    def closing(self) -> bytes:
        """The end mark, behind the chunk with the usage and no choices where one is asked for."""
        return self._frame.closing()

    def failure(self, error: ApiError) -> bytes:
        """As EventEncoder."""
        return failure(error)

    def _opening(self, choice: int) -> bytes:
        opening, self._openings[choice] = self._openings[choice], b""
        start = self._frame.choice_starts[choice]
        self._text_frames[choice] = self._text_frame(choice, start + self._shape.text_start)
        if not opening:
            return b""
        if self._echoes_logprobs and self._logprobs is not None:
            opening += _LOGPROBS + self._logprobs[choice].take()
        return self._with_first(choice, start + opening + _OPEN[:-1], self._frame.end())

    def _with_first(self, choice: int, start: bytes, end: bytes) -> bytes:
        """A chunk, with what only a choice's first one has. start: without the brace that closes the choice."""
        first, self._first[choice] = self._first[choice], b""
        if not first:
            return start + b"}" + end
        if self._shape.tells_within_choice:
            return start + b"," + first + b"}" + end
        return start + b"}" + end.replace(b"]", b"]," + first, 1)

    def _text_frame(self, choice: int, before: bytes) -> TextFrame:
        text_end, after = self._shape.text_end, _OPEN + (b"" if self.continuous_usage else self._frame.end())
        if self._logprobs is None:
            return TextFrame(before, text_end + after)
        return TextFrame(before, after, (text_end + _LOGPROBS, self._logprobs[choice]))

    def _chunk(self, choice: int, delta: Added) -> bytes:
        if self._logprobs is not None:
            self._logprobs[choice].add(delta.logprobs or ())
        text, finish_reason = delta.text, delta.finish_reason
        token_ids = delta.token_ids if self._token_ids else []
        if finish_reason is None and not text and not token_ids:
            return b""
        shape, payload = self._shape, self._shape.no_text
        if text:
            payload = shape.text_start + orjson.dumps(text) + shape.text_end
        if self._logprobs is not None:
            payload += _LOGPROBS + self._logprobs[choice].take()
        if self._token_ids:
            payload += b',"token_ids":' + orjson.dumps(token_ids)
        start = self._frame.choice_starts[choice]
        if finish_reason is None:
            return self._with_first(choice, start + payload + _OPEN[:-1], self._frame.end())
        reasons = orjson.dumps({"finish_reason": finish_reason, "stop_reason": delta.stop_reason})
        ended = start + payload + b"," + reasons[1:-1]
        return self._with_first(choice, ended, self._frame.end(terminal=True))


def _first_members(told: Told, shape: _Shape, num_choices: int) -> list[bytes]:
    """Per choice the members that its first chunk alone has: of completions in the choice, of chat beside them."""
    members = [orjson.dumps(prompt)[1:-1] for prompt in told.prompts]
    return members if shape.tells_within_choice else members * num_choices


def chat_chunks(
    head: ReplyHead,
    *,
    num_choices: int,
    options: StreamOptions,
    usage: Usage,
    logprobs: Sequence[LogprobsEncoder] | None,
    echo: str = "",
    told: Told | None = None,
) -> ChunkEncoder:
    """Chunks of a chat completion; each choice's first one has the role. logprobs: one per choice.

    echo: text that goes before each answer, in the chunk with the role.
    """
    frame = ChunkFrame(head, _CHAT.kind, num_choices, options, usage)
    return ChunkEncoder(frame, _CHAT, [role_payload(echo)] * num_choices, logprobs, told)


def role_payload(echo: str) -> bytes:
    """The payload of a choice's first chunk. echo: text that goes before the answer."""
    return ROLE.removesuffix(b'""}') + orjson.dumps(echo) + b"}"


def completion_chunks(
    head: ReplyHead,
    *,
    options: StreamOptions,
    usage: Usage,
    echoes: Sequence[str],
    logprobs: Sequence[LogprobsEncoder] | None,
    told: Told | None = None,
    echoes_logprobs: bool = False,
) -> ChunkEncoder:
    """Chunks of a completion.

    echoes: per choice the prompt text to send first ("" without echo). logprobs: one per choice. echoes_logprobs: they
    begin with those of the prompt.
    """
    frame = ChunkFrame(head, _COMPLETION.kind, len(echoes), options, usage)
    openings = [
        _COMPLETION.text_start + orjson.dumps(echo) if echo or echoes_logprobs else b"" for echo in echoes
    ]
    return ChunkEncoder(frame, _COMPLETION, openings, logprobs, told, echoes_logprobs=echoes_logprobs)
