"""How Messages and Responses take replies apart: as chat does, or as plain text."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from oneloop.api.errors import bad_request
from oneloop.parsers.events import Content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oneloop.api.parsing import Parsing
    from oneloop.api.replies import Usage
    from oneloop.api.state import ApiState
    from oneloop.engine.outputs import FinishReason
    from oneloop.parsers.events import Event, ToolCallStart


class BlockSource(Protocol):
    """What a reply's blocks are made from: `ReplyParser`, or plain text."""

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is content as it stands."""

    def add(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Event]:
        """What is certain with this text of these tokens; with a finish reason, all."""

    def call_id(self, start: ToolCallStart) -> str:
        """The id of a call: the model's own, else a new one."""


class PlainText:
    """Everything is content."""

    __slots__ = ()

    is_plain = True

    def add(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Event]:
        """As BlockSource."""
        return [Content(text)] if text else []

    def call_id(self, start: ToolCallStart) -> str:
        """As BlockSource."""
        return start.id or f"call_{secrets.token_hex(12)}"


def block_source(parsing: Parsing | None, usage: Usage) -> BlockSource:
    """For one reply. parsing: None for plain text. usage: is told of its tokens of thinking."""
    return PlainText() if parsing is None else parsing.parser(usage)


def end_thinking(state: ApiState, request_id: str) -> None:
    """Let the live requests with this id go on as if their thinking were over; nothing happens where it is.

    ApiError (400) where the model has no mark for it, or the prompt of none of them has opened the thinking.
    """
    end = state.formats.thinking_end
    if not end:
        raise bad_request(
            "action", "end_thinking: the output of this model has no thinking that could be ended."
        )
    if not state.engine.end_thinking(request_id, end):
        raise bad_request(
            "action", "end_thinking: the prompt of this request has opened no thinking that could be ended."
        )
