"""Chat replies of parsed text: content, thinking and calls, whole or as chunks. Plain text goes by chunks.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from oneloop.api.chunks import CHAT_KIND, ChunkFrame, chat_chunks, failure, role_payload
from oneloop.api.replies import chat_reply
from oneloop.engine.relay import TextFrame
from oneloop.parsers.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.api.encoder import EventEncoder
    from oneloop.api.errors import ApiError
    from oneloop.api.parsing import Parsing, ReplyParser
    from oneloop.api.protocol.sampling import StreamOptions
    from oneloop.api.replies import Choice, Logprobs, ReplyHead, Told, Usage
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTeller:
    """Tells what was generated as a chat completion, whole or streamed."""

    head: ReplyHead
    parsing: Parsing | None
    """None: all of the text is content."""
    usage: Usage
    echo: str = ""
    """Text that goes before each answer."""
    told: Told | None = None

    def encoder(
        self, n: int, options: StreamOptions, logprobs: Sequence[LogprobsEncoder] | None
    ) -> EventEncoder:
        """Of a stream of n choices; one for plain text where nothing is to be taken apart."""
        head, usage, echo, told = self.head, self.usage, self.echo, self.told
        if self.parsing is None:
            return chat_chunks(
                head, num_choices=n, options=options, usage=usage, logprobs=logprobs, echo=echo, told=told
            )
        parsers = [self.parsing.parser(usage) for _ in range(n)]
        return ParsedChunkEncoder(
            head, parsers, options=options, usage=usage, logprobs=logprobs, echo=echo, told=told
        )

    def reply(self, choices: Sequence[Choice], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """A whole one."""
        parsing, usage = self.parsing, self.usage
        if parsing is None:
            answers = [plain_answer(choice) for choice in choices]
        else:
            answers = [parsed_answer(choice, parsing.parser(usage)) for choice in choices]
        return chat_reply(self.head, choices, answers, usage, logprobs, echo=self.echo, told=self.told)


CallId: TypeAlias = "Callable[[ToolCallStart], str]"


@dataclass(slots=True)
class Answer:
    """One choice of a whole reply."""

    content: str | None
    finish_reason: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def plain_answer(choice: Choice) -> Answer:
    """All of the text is content."""
    return Answer(choice.text, choice.finish_reason)


def parsed_answer(choice: Choice, parser: ReplyParser) -> Answer:
    """A whole text through its parser. Fields without text are None."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in parser.add(choice.text, choice.token_ids, choice.finish_reason or "stop"):
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index):
                calls[index] = _call(event, parser.call_id)
                arguments[index] = []
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    for index, call in calls.items():
        call["function"]["arguments"] = "".join(arguments[index])
    return Answer(
        "".join(content) or None,
        parser.finish_reason(choice.finish_reason or "stop"),
        "".join(reasoning) or None,
        list(calls.values()),
    )


def _call(start: ToolCallStart, call_id: CallId) -> dict[str, Any]:
    return {
        "id": call_id(start),
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }


_LOGPROBS = b',"logprobs":'
_OPEN = b',"finish_reason":null}'
_NOTHING = b'"delta":{}'


class ParsedChunkEncoder:
    """Turns each choice's deltas into the events of one streamed reply, a chunk per piece of content, thinking or call.

    Log-probabilities go with the next chunk that is written: those of marks, too.
    """

    __slots__ = (
        "_first", "_frame", "_logprobs", "_opened", "_parsers", "_role", "_token_ids", "continuous_usage",
        "num_choices",
    )  # fmt: skip

    def __init__(
        self,
        head: ReplyHead,
        parsers: Sequence[ReplyParser],
        *,
        options: StreamOptions,
        usage: Usage,
        logprobs: Sequence[LogprobsEncoder] | None,
        echo: str = "",
        told: Told | None = None,
    ) -> None:
        """parsers, logprobs: one per choice. echo: text that goes before each answer."""
        self._role = role_payload(echo)
        self._token_ids = told is not None and told.token_ids
        self._first = b"" if told is None else orjson.dumps(told.prompts[0])[1:-1]
        self._frame = ChunkFrame(head, CHAT_KIND, len(parsers), options, usage)
        self._parsers = parsers
        self._logprobs = logprobs
        self._opened = [False] * len(parsers)
        self.num_choices = len(parsers)
        self.continuous_usage = self._frame.continuous

    def encode(self, choice: int, delta: Added) -> bytes:
        """As ChunkEncoder.encode."""
        if self._logprobs is not None:
            self._logprobs[choice].add(delta.logprobs or ())
        parser, finish_reason = self._parsers[choice], delta.finish_reason
        events = parser.add(delta.text, delta.token_ids, finish_reason)
        payloads = [_payload(event, parser.call_id) for event in events if type(event) is not ToolCallEnd]
        parts = []
        if not self._opened[choice]:
            self._opened[choice] = True
            end = self._frame.end()
            end = end.replace(b"]", b"]," + self._first, 1) if self._first else end
            parts.append(self._frame.choice_starts[choice] + self._role + _OPEN + end)
        token_ids = list(delta.token_ids) if self._token_ids else []
        if finish_reason is None and not payloads and not token_ids:
            return b"".join(parts)
        *before, last = payloads or [_NOTHING]
        parts += [self._chunk(choice, payload) for payload in before]
        if self._token_ids:  # all of the delta's, with the last of what they came to
            last += b',"token_ids":' + orjson.dumps(token_ids)
        reasons = None
        if finish_reason is not None:
            reasons = {"finish_reason": parser.finish_reason(finish_reason), "stop_reason": delta.stop_reason}
        parts.append(self._chunk(choice, last, reasons))
        return b"".join(parts)

    def text_frame(self, choice: int) -> TextFrame | None:
        """None while the parser has something to take apart; then all that follows is content."""
        if not self._opened[choice] or self.continuous_usage or self._token_ids:
            return None
        if not self._parsers[choice].is_plain:
            return None
        before = self._frame.choice_starts[choice] + b'"delta":{"content":'
        after = _OPEN + self._frame.end()
        if self._logprobs is None:
            return TextFrame(before, b"}" + after)
        return TextFrame(before, after, (b"}" + _LOGPROBS, self._logprobs[choice]))

    def closing(self) -> bytes:
        """As ChunkEncoder.closing."""
        return self._frame.closing()

    def failure(self, error: ApiError) -> bytes:
        """As ChunkEncoder.failure."""
        return failure(error)

    def _chunk(self, choice: int, payload: bytes, reasons: dict[str, Any] | None = None) -> bytes:
        if self._logprobs is not None:
            payload += _LOGPROBS + self._logprobs[choice].take()
        start = self._frame.choice_starts[choice]
        if reasons is None:
            return start + payload + _OPEN + self._frame.end()
        return start + payload + b"," + orjson.dumps(reasons)[1:] + self._frame.end(terminal=True)


def _payload(event: Event, call_id: CallId) -> bytes:
    match event:
        case Content(text):
            return b'"delta":{"content":' + orjson.dumps(text) + b"}"
        case Reasoning(text):
            return b'"delta":{"reasoning":' + orjson.dumps(text) + b"}"
        case ToolCallStart(index):
            piece: dict[str, Any] = {"index": index, **_call(event, call_id)}
        case ToolCallArguments(index, text):
            piece = {"index": index, "function": {"arguments": text}}
        case ToolCallEnd():
            return _NOTHING
    return b'"delta":' + orjson.dumps({"tool_calls": [piece]})


def events_delta(events: Sequence[Event], call_id: CallId) -> dict[str, Any]:
    """One `delta` of several events."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning"] = delta.get("reasoning", "") + text
            case ToolCallStart(index):
                calls.append({"index": index, **_call(event, call_id)})
            case ToolCallArguments(index, text):
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    return {**delta, "tool_calls": calls} if calls else delta
