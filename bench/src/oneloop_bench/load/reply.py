"""Readers of replies: what came when, and what the checks need to know, with little work per event.

The events of one stream differ in nothing but their text. The first one is parsed; what stands before and after its
text is then a template, and an event that begins and ends like it, with no quote in between, is the same JSON with
another text. Whatever does not fit (first and last events, usage, errors, a text with quotes) is parsed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from oneloop_bench.load.record import Choice, Seen, Usage

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping

_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)"\s*:\s*"((?:[^"\\]|\\.)*)"')
_NEVER = 1 << 62
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
MAX_ERROR_CHARS = 300
MAX_COUNT = 1 << 40
"""Tokens of one reply: sums of such counts are still integers of JSON."""


class StreamReply:
    """A streamed reply. Times of events with output go to `times`; on_end's error to `error`."""

    def __init__(
        self, times: array[float], done: Callable[[], None], *, is_chat: bool, keeps_text: bool
    ) -> None:
        """done: called once, at the end. keeps_text: gather the reply's text (of its first choice)."""
        self.seen = Seen(is_chat=is_chat)
        self.status = 0
        self.error: str | None = None
        self.end = 0.0
        self._times = times
        self._done = done
        self._keeps_text = keeps_text
        self._pieces: list[bytes] = []
        self._pending = b""
        self._prefix = b""
        self._suffix = b""
        self._least = _NEVER
        """Bytes of an event with an empty text; larger than any while there is no template."""
        self._refused: list[bytes] = []
        self._location: bytes | None = None

    @property
    def text(self) -> str:
        """What was kept."""
        return "".join(orjson.loads(b'"%b"' % piece) for piece in self._pieces)

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See Reply."""
        self.status, self._location = status, headers.get(b"location")

    def on_body(self, data: bytes, now: float) -> None:
        """See Reply. The hot path: once per read, some 2 µs with one event in it."""
        if self.status != 200:
            self._refused.append(data)
            return
        if self._pending:
            data = self._pending + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._pending = events.pop()
        least, prefix, suffix, count = self._least, self._prefix, self._suffix, 0
        for event in events:
            size = len(event)
            if size >= least and event.startswith(prefix) and event.endswith(suffix):
                piece = event[len(prefix) : size - len(suffix)]
                if b'"' not in piece and ((piece.isascii() and b"\\" not in piece) or _is_text(piece)):
                    count += 1
                    self.seen.num_texts += size > least
                    if self._keeps_text:
                        self._pieces.append(piece)
                    continue
            count += self._read(event)
            least, prefix, suffix = self._least, self._prefix, self._suffix
        if count == 1:
            self._times.append(now)
        elif count:
            self._times.extend([now] * count)

    def on_end(self, now: float, error: str | None) -> None:
        """See Reply."""
        self.end = now
        if self.status != 200 and error is None:
            error = _refusal(self.status, b"".join(self._refused), self._location)
        elif self._pending.strip() and error is None:
            self.seen.num_malformed += 1  # a last event that was never ended
        self.error = self.error or error
        self._done()

    def _read(self, event: bytes) -> bool:
        """Parse one event; True when it brought output."""
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return False  # a comment, or an empty one, which keep a connection alive
        data = b"\n".join(lines)
        seen = self.seen
        if seen.is_done:
            seen.num_after_done += 1
            return False
        if data == b"[DONE]":
            seen.is_done = True
            return False
        try:
            found = orjson.loads(data)
            is_output = self._observe(found)
        except (ValueError, TypeError, KeyError, AttributeError):
            seen.num_malformed += 1
            return False
        if is_output:
            self._learn(event, found)
        return is_output

    def _observe(self, found: dict[str, Any]) -> bool:
        """Note what the checks need; True when the event brought output."""
        if found.get("error"):
            self.error = f"an error in the stream: {orjson.dumps(found['error']).decode()[:MAX_ERROR_CHARS]}"
            return False
        if found.get("usage"):
            self.seen.usage = read_usage(found["usage"])
        is_output = False
        for item in found["choices"]:
            delta = item["delta"] if self.seen.is_chat else item
            has_text = _has_text(delta)
            choice = choice_of(self.seen, item)
            role, reason = delta.get("role"), item.get("finish_reason")
            if choice.finish_reason is not None:
                choice.num_after_finish += 1
                continue
            if role is not None:
                choice.num_roles += 1
            elif has_text and not choice.num_roles:
                choice.has_text_before_role = True
            if reason is not None:
                choice.finish_reason = reason
                self._least = _NEVER  # what comes after it must be looked at
            self.seen.num_texts += has_text
            count_ids(self.seen, item)
            # An empty text with neither role nor reason is a token without text of its own.
            is_output |= has_text or (role is None and reason is None)
            if self._keeps_text and has_text and item.get("index", 0) == 0:
                text = _text(delta, "content" if self.seen.is_chat else "text")
                self._pieces.append(orjson.dumps(text)[1:-1])
        return is_output

    def _learn(self, event: bytes, found: dict[str, Any]) -> None:
        """Make the event a template, if it is one of a single choice's plain text."""
        if self.seen.num_ids is not None or found.get("usage") or len(found["choices"]) != 1:
            return
        item = found["choices"][0]
        delta = item["delta"] if self.seen.is_chat else item
        place = _TEXT.search(event)
        if place is None or delta.get("role") is not None or item.get("finish_reason") is not None:
            return
        text = delta.get("content" if self.seen.is_chat else "text")
        if self._keeps_text and (not text or item.get("index", 0) != 0):
            return  # its text is not the reply's
        self._prefix, self._suffix = event[: place.start(1)], event[place.end(1) :]
        self._least = len(self._prefix) + len(self._suffix)


class WholeReply:
    """A reply that is one JSON object."""

    def __init__(self, done: Callable[[], None], *, is_chat: bool) -> None:
        """done: called once, at the end."""
        self.seen = Seen(is_stream=False, is_chat=is_chat)
        self.status = 0
        self.error: str | None = None
        self.end = 0.0
        self.text = ""
        self._done = done
        self._pieces: list[bytes] = []
        self._location: bytes | None = None

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """See Reply."""
        self.status, self._location = status, headers.get(b"location")

    def on_body(self, data: bytes, now: float) -> None:
        """See Reply."""
        self._pieces.append(data)

    def on_end(self, now: float, error: str | None) -> None:
        """See Reply."""
        self.end, self.error = now, error
        body = b"".join(self._pieces)
        if error is None and self.status != 200:
            self.error = _refusal(self.status, body, self._location)
        elif error is None:
            try:
                self._observe(orjson.loads(body))
            except (ValueError, TypeError, KeyError, AttributeError):
                self.seen.num_malformed += 1
        self._done()

    def _observe(self, found: dict[str, Any]) -> None:
        seen = self.seen
        seen.usage = read_usage(found["usage"]) if found.get("usage") else None
        for item in found["choices"]:
            message = item["message"] if seen.is_chat else item
            reason = item.get("finish_reason")
            choice = choice_of(seen, item)
            choice.num_roles += message.get("role") is not None
            choice.finish_reason = reason
            count_ids(seen, item)
            if item.get("index", 0) == 0:
                self.text = _text(message, "content" if seen.is_chat else "text")


def _is_text(piece: bytes) -> bool:
    """Whether it is the inside of a JSON string."""
    try:
        orjson.loads(b'"%b"' % piece)
    except ValueError:
        return False
    return True


def _has_text(delta: Mapping[str, Any]) -> bool:
    """Whether a delta (of chat) or a choice (of completions) brings anything. TypeError for a text that is none."""
    return bool(any(_text(delta, name) for name in ("text", *_TEXT_FIELDS)) or delta.get("tool_calls"))


def _text(delta: Mapping[str, Any], name: str) -> str:
    text = delta.get(name) or ""
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text


def choice_of(seen: Seen, item: Mapping[str, Any]) -> Choice:
    """What was seen of the choice. TypeError for an index that is no whole number."""
    return seen.choices.setdefault(_count(item.get("index", 0)), Choice())


def count_ids(seen: Seen, item: Mapping[str, Any]) -> None:
    """Add the tokens of a choice that tells their ids, or their log-probabilities."""
    ids, logprobs = item.get("token_ids"), item.get("logprobs")
    entries = None
    if isinstance(ids, list):
        entries = ids
    elif isinstance(logprobs, dict):
        entries = logprobs.get("content" if seen.is_chat else "tokens")
    if isinstance(entries, list):
        seen.num_ids = (seen.num_ids or 0) + len(entries)


def read_usage(usage: Mapping[str, Any]) -> Usage:
    """A reply's `usage`. TypeError for counts that are no whole numbers, KeyError without the prompt's."""
    details = usage.get("prompt_tokens_details") or {}
    completion = _count(usage.get("completion_tokens") or 0)
    prompt = _count(usage["prompt_tokens"])
    cached = details.get("cached_tokens")
    return Usage(
        prompt,
        completion,
        _count(usage.get("total_tokens", prompt + completion)),
        None if cached is None else _count(cached),
    )


def _count(value: object) -> int:
    """The value, if it is a whole number from 0 that can be added to others. TypeError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise TypeError(f"{value!r} is no count")
    return value


def _refusal(status: int, body: bytes, location: bytes | None) -> str:
    """What a reply that is no 200 says. location: where else it sends; nobody is followed there."""
    said = body.decode("utf-8", "replace").strip()
    if location is not None:
        said = f"it sends to {location.decode('utf-8', 'replace')}, which --base-url may name. {said}"
    return f"status {status}: {said or 'without a body'}"[:MAX_ERROR_CHARS]
