"""Deltas → the numbered events of a streamed response, and the response object that they add up to.

A whole reply is made in the same way: its events are just not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.blocks import BlockTracker, Closed, Grown, Opened
from oneloop.api.responses.reply import new_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from oneloop.api.blocks import Block, BlockEvent
    from oneloop.api.errors import ApiError
    from oneloop.api.reply_format import BlockSource
    from oneloop.api.responses.reply import ResponseObject
    from oneloop.engine.logprobs import LogprobsEncoder
    from oneloop.engine.outputs import Added
    from oneloop.engine.relay import TextFrame

_LOGPROBS_START, _LOGPROBS_END = len(b'{"content":['), len(b"]}")
"""What `LogprobsEncoder` has around the tokens."""


class ResponseEncoder:
    """Turns the deltas of one response into its events: one item after the other."""

    __slots__ = (
        "_begun",
        "_item_logprobs",
        "_logprobs",
        "_new_logprobs",
        "_number",
        "_on_end",
        "_response",
        "_source",
        "_tracker",
    )  # fmt: skip

    num_choices = 1
    continuous_usage = False

    def __init__(
        self,
        response: ResponseObject,
        source: BlockSource,
        logprobs: LogprobsEncoder | None,
        on_end: Callable[[], None],
    ) -> None:
        """logprobs: None where none are shown. on_end: called once nothing of the response changes any more."""
        self._response = response
        self._source = source
        self._logprobs = logprobs
        self._on_end = on_end
        self._tracker = BlockTracker(source.call_id)
        self._begun = False
        self._number = 0
        self._new_logprobs: list[bytes] = []
        """JSON of tokens whose text is still to come, separated by commas."""
        self._item_logprobs: list[bytes] = []
        """Of the item that is open."""

    def encode(self, choice: int, delta: Added) -> bytes:
        """As EventEncoder."""
        out = [] if self._begun else [self._status("response.created"), self._status("response.in_progress")]
        self._begun = True
        text, finish_reason = delta.text, delta.finish_reason
        self._note_logprobs(delta)
        changes = self._tracker.add(self._source.add(text, delta.token_ids, finish_reason))
        if finish_reason is not None:
            changes += self._tracker.finish(finish_reason)
            self._response.end(finish_reason)
        for change in changes:
            self._apply(change, out)
        return b"".join(out)

    def text_frame(self, choice: int) -> TextFrame | None:
        """As EventEncoder: every event has a number of its own."""
        return None

    def closing(self) -> bytes:
        """As EventEncoder: the whole response."""
        response = self._response
        self._on_end()
        kind = (
            "response.incomplete" if response.status in ("incomplete", "cancelled") else "response.completed"
        )
        return self._status(kind)

    def failure(self, error: ApiError) -> bytes:
        """As EventEncoder: the response as far as it came."""
        self._response.fail(error)
        self._on_end()
        return self._status("response.failed")

    def _note_logprobs(self, delta: Added) -> None:
        """Keep the tokens' log-probabilities until text of theirs is shown; those of thinking are shown nowhere."""
        if self._logprobs is None:
            return
        self._logprobs.add(delta.logprobs or ())
        tokens = self._logprobs.take()[_LOGPROBS_START:-_LOGPROBS_END]
        if tokens:
            self._new_logprobs.append(tokens)

    def _apply(self, change: BlockEvent, out: list[bytes]) -> None:
        block = change.block
        match change:
            case Opened():
                self._open(block, out)
            case Grown(_, text):
                self._grow(block, text, out)
            case Closed():
                self._close(block, out)

    def _open(self, block: Block, out: list[bytes]) -> None:
        item = new_item(block)
        self._response.output.append(item)
        self._item_logprobs = []
        out.append(self._event("response.output_item.added", {"output_index": block.index, "item": item}))
        if block.kind != "call":
            out.append(
                self._event("response.content_part.added", self._place(block) | {"part": _part(block, "")})
            )

    def _grow(self, block: Block, text: str, out: list[bytes]) -> None:
        members = self._place(block) | {"delta": text}
        match block.kind:
            case "text":
                new, self._new_logprobs = self._new_logprobs, []
                self._item_logprobs += new
                out.append(self._event("response.output_text.delta", members | {"logprobs": _tokens(new)}))
            case "thinking":
                self._new_logprobs = []
                out.append(self._event("response.reasoning_text.delta", members))
            case "call":
                self._new_logprobs = []
                out.append(self._event("response.function_call_arguments.delta", members))

    def _close(self, block: Block, out: list[bytes]) -> None:
        item, place, text = self._response.output[block.index], self._place(block), block.text
        item["status"] = "completed" if block.is_whole else "incomplete"
        if block.kind == "call":
            item["arguments"] = text
            members = place | {"name": block.name, "arguments": text}
            out.append(self._event("response.function_call_arguments.done", members))
        else:
            members = place | {"text": text}
            part = _part(block, text)
            if block.kind == "text":
                self._item_logprobs += self._new_logprobs  # of tokens without text of their own
                self._new_logprobs = []
                part["logprobs"] = members["logprobs"] = _tokens(self._item_logprobs)
            item["content"].append(part)
            name = "output_text" if block.kind == "text" else "reasoning_text"
            out.append(self._event(f"response.{name}.done", members))
            out.append(self._event("response.content_part.done", place | {"part": part}))
        out.append(self._event("response.output_item.done", {"output_index": block.index, "item": item}))

    def _place(self, block: Block) -> dict[str, Any]:
        """Where an event belongs."""
        place = {"item_id": self._response.output[block.index]["id"], "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _status(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._response.wire()})

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tokens(pieces: list[bytes]) -> Any:
    """A list of log-probabilities."""
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]") if pieces else []
