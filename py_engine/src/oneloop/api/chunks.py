"""Deltas → SSE bytes. What never changes within a reply is encoded once per choice; a token costs one JSON string.

The only place that knows the shape of a chunk, so that it can move into the core as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import orjson

from oneloop.api.replies import SYSTEM_FINGERPRINT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.logprobs import LogprobsEncoder
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import ReplyHead, Usage
    from oneloop.engine.outputs import SequenceDelta

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One SSE event holding a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class ChunkEncoder(Protocol):
    """Turns one choice's deltas into events."""

    def encode(self, choice: int, delta: SequenceDelta) -> bytes:
        """The events of this delta, in order; empty while text is held back."""

    def usage_event(self) -> bytes:
        """The chunk with the usage and no choices."""


class _Frame:
    """The constant bytes around a choice's payload, and the usage that a chunk carries."""

    def __init__(
        self, head: ReplyHead, kind: str, num_choices: int, options: StreamOptions, usage: Usage
    ) -> None:
        start = orjson.dumps({"id": head.id, "object": kind, "created": head.created, "model": head.model})
        self._start = b"data: " + start[:-1] + b',"choices":['
        self.choice_starts = [self._start + b'{"index":%d,' % index for index in range(num_choices)]
        self._usage = usage
        self._continuous = options.continuous_usage
        without = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(SYSTEM_FINGERPRINT)
        self._end = b"]" + without
        self._terminal_end = b"]" + self._fingerprint + without

    def end(self, *, terminal: bool = False) -> bytes:
        """What closes the list of choices and the event."""
        if not self._continuous:
            return self._terminal_end if terminal else self._end
        fingerprint = self._fingerprint if terminal else b""
        return b"]" + fingerprint + b',"usage":' + orjson.dumps(self._usage.wire()) + b"}\n\n"

    def usage_event(self) -> bytes:
        """No choices, the final usage."""
        usage = orjson.dumps(self._usage.wire())
        return self._start + b"]" + self._fingerprint + b',"usage":' + usage + b"}\n\n"


def _finish(delta: SequenceDelta) -> bytes:
    reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    return b"," + orjson.dumps(reasons)[1:]


_OPEN = b',"finish_reason":null}'


class ChatChunks:
    """Chunks of a chat completion."""

    def __init__(
        self,
        head: ReplyHead,
        *,
        num_choices: int,
        options: StreamOptions,
        usage: Usage,
        logprobs: Sequence[LogprobsEncoder] | None,
    ) -> None:
        """logprobs: one per choice."""
        self._frame = _Frame(head, "chat.completion.chunk", num_choices, options, usage)
        self._logprobs = logprobs
        self._unopened = set(range(num_choices))

    def encode(self, choice: int, delta: SequenceDelta) -> bytes:
        """First the role, once per choice; then text; the last one has the finish reason."""
        start = self._frame.choice_starts[choice]
        opening = b""
        if choice in self._unopened:
            self._unopened.discard(choice)
            opening = start + b'"delta":{"role":"assistant","content":""}' + _OPEN + self._frame.end()
        if self._logprobs is not None:
            self._logprobs[choice].add(delta.logprobs or ())
        if delta.finish_reason is None and not delta.text:
            return opening
        payload = b'"delta":{"content":%b}' % orjson.dumps(delta.text) if delta.text else b'"delta":{}'
        if self._logprobs is not None:
            payload += b',"logprobs":' + self._logprobs[choice].take()
        if delta.finish_reason is None:
            return opening + start + payload + _OPEN + self._frame.end()
        return opening + start + payload + _finish(delta) + self._frame.end(terminal=True)

    def usage_event(self) -> bytes:
        """The chunk with the usage and no choices."""
        return self._frame.usage_event()


class CompletionChunks:
    """Chunks of a completion."""

    def __init__(
        self,
        head: ReplyHead,
        *,
        options: StreamOptions,
        usage: Usage,
        echoes: Sequence[str],
        logprobs: Sequence[LogprobsEncoder] | None,
    ) -> None:
        """echoes: per choice the prompt text to send first ("" without echo). logprobs: one per choice."""
        self._frame = _Frame(head, "text_completion", len(echoes), options, usage)
        self._echoes = list(echoes)
        self._logprobs = logprobs

    def encode(self, choice: int, delta: SequenceDelta) -> bytes:
        """The echo first, as a chunk of its own; then text; the last one has the finish reason."""
        start = self._frame.choice_starts[choice]
        opening = b""
        if self._echoes[choice]:
            opening = start + b'"text":' + orjson.dumps(self._echoes[choice]) + _OPEN + self._frame.end()
            self._echoes[choice] = ""
        if self._logprobs is not None:
            self._logprobs[choice].add(delta.logprobs or ())
        if delta.finish_reason is None and not delta.text:
            return opening
        payload = b'"text":' + orjson.dumps(delta.text)
        if self._logprobs is not None:
            payload += b',"logprobs":' + self._logprobs[choice].take()
        if delta.finish_reason is None:
            return opening + start + payload + _OPEN + self._frame.end()
        return opening + start + payload + _finish(delta) + self._frame.end(terminal=True)

    def usage_event(self) -> bytes:
        """The chunk with the usage and no choices."""
        return self._frame.usage_event()
