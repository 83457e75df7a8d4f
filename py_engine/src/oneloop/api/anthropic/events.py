"""Deltas → the named events of a streamed message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.anthropic.errors import anthropic_error
from oneloop.api.anthropic.reply import message_wire, stop_members, usage_wire
from oneloop.api.blocks import BlockTracker, Closed, Grown, Opened
from oneloop.engine.relay import TextFrame

if TYPE_CHECKING:
    from oneloop.api.blocks import Block, BlockEvent
    from oneloop.api.errors import ApiError
    from oneloop.api.replies import ReplyHead, Usage
    from oneloop.api.reply_format import BlockSource
    from oneloop.engine.outputs import Added, FinishReason

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:'
_DELTA_END = b"}}\n\n"
_DELTA_TYPES = {
    "text": b'"text_delta","text"',
    "thinking": b'"thinking_delta","thinking"',
    "call": b'"input_json_delta","partial_json"',
}


class MessageEncoder:
    """Turns the deltas of one message into its events: one block after the other."""

    __slots__ = (
        "_ended",
        "_head",
        "_is_full",
        "_opened",
        "_request_id",
        "_source",
        "_stop",
        "_tracker",
        "_usage",
    )

    num_choices = 1

    def __init__(
        self, head: ReplyHead, usage: Usage, source: BlockSource, *, request_id: str, is_full: bool
    ) -> None:
        """usage: as it grows. is_full: a length that is met is the context's."""
        self._head = head
        self._usage = usage
        self._source = source
        self._request_id = request_id
        self._is_full = is_full
        self._tracker = BlockTracker(source.call_id)
        self._opened = False
        self._ended: FinishReason | None = None
        self._stop: int | str | None = None

    @property
    def continuous_usage(self) -> bool:
        """As EventEncoder: the first event shows it."""
        return not self._opened

    def encode(self, choice: int, delta: Added) -> bytes:
        """As EventEncoder."""
        out = b"" if self._opened else self._opening()
        text, finish_reason = delta.text, delta.finish_reason
        changes = self._tracker.add(self._source.add(text, delta.token_ids, finish_reason))
        if finish_reason is not None:
            self._ended, self._stop = finish_reason, delta.stop_reason
            changes += self._tracker.finish(finish_reason)
        return out + b"".join([_event_of(change) for change in changes])

    def text_frame(self, choice: int) -> TextFrame | None:
        """As EventEncoder: once there is nothing to take apart, and the block of the text is open."""
        block = self._tracker.open_block
        if block is None or block.kind != "text" or not self._source.is_plain:
            return None
        return TextFrame(_DELTA % (block.index, _DELTA_TYPES["text"]), _DELTA_END)

    def closing(self) -> bytes:
        """As EventEncoder: why it ended, with the usage, and the end mark."""
        stop = stop_members(self._ended, self._stop, has_calls=self._tracker.has_calls, is_full=self._is_full)
        return _event("message_delta", {"delta": stop, "usage": usage_wire(self._usage)}) + _STOPPED

    def failure(self, error: ApiError) -> bytes:
        """As EventEncoder."""
        return b"event: error\ndata: " + anthropic_error(error, self._request_id) + b"\n\n"

    def _opening(self) -> bytes:
        self._opened = True
        return _event("message_start", {"message": message_wire(self._head, self._usage)}) + _PING


def _event(kind: str, members: dict[str, Any]) -> bytes:
    data = orjson.dumps({"type": kind, **members})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _event_of(change: BlockEvent) -> bytes:
    match change:
        case Opened(block):
            return _event("content_block_start", {"index": block.index, "content_block": _empty(block)})
        case Grown(block, text):
            start = _DELTA % (block.index, _DELTA_TYPES[block.kind])
            return start + orjson.dumps(text) + _DELTA_END
        case Closed(block):
            signature = b""
            if block.kind == "thinking":
                delta = {"type": "signature_delta", "signature": ""}
                signature = _event("content_block_delta", {"index": block.index, "delta": delta})
            return signature + _event("content_block_stop", {"index": block.index})


def _empty(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
