"""Which parser takes a reply apart: the one place where the model's output format is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oneloop.api.errors import bad_request
from oneloop.parsers.events import Content

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.api.state import ApiState
    from oneloop.api.toolset import Toolset
    from oneloop.parsers.events import Event, OutputParser


class PlainText:
    """A format without marks: everything is content."""

    __slots__ = ()

    def push(self, text: str) -> list[Event]:
        """As OutputParser."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """As OutputParser."""
        return []


def make_parser(state: ApiState, toolset: Toolset) -> OutputParser:
    """A parser for one sequence of a reply. toolset: what the request offers."""
    return PlainText()


def check_choice(toolset: Toolset, param: str) -> None:
    """Refuse what the model's text cannot be held to. ApiError (400). param: the client's word for the choice."""
    if toolset.choice == "required":
        raise bad_request(param, f"{param} can be auto or none; that a tool is called is not supported yet.")


def end_thinking(state: ApiState, request_id: str) -> None:
    """Let the live requests with this id go on as if their thinking were over. ApiError (400) where there is none."""
    raise bad_request("action", "end_thinking: the output of this model has no thinking that could be ended.")


def check_format(wanted: Mapping[str, Any], param: str) -> None:
    """Refuse a form of answers that cannot be held. ApiError (400). wanted: {"type": …}. param: the client's word."""
    if wanted.get("type") != "text":
        raise bad_request(param, f'{param} can be {{"type": "text"}}; another form is not supported yet.')
