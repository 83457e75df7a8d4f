"""POST /v1/requests/{request_id}/control: what may be done to a request that runs or waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.api.errors import ApiError, ErrorKind, bad_request
from oneloop.api.handlers.json_reply import json_reply
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.sampling import MAX_PRIORITY
from oneloop.api.reply_format import end_thinking
from oneloop.api.state import STATE

if TYPE_CHECKING:
    from aiohttp import web

    from oneloop.api.state import ApiState

ACTIONS = ("cancel", "end_thinking", "set_priority")
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")
"""Of the ids of replies, before the request's own."""


@dataclass(frozen=True, slots=True)
class _Asked:
    action: str
    priority: int | None
    ignored: list[str]


async def control(request: web.Request) -> web.StreamResponse:
    """Cancel it, end its thinking, change its priority. ApiError (404) where no such request is live."""
    state = request.app[STATE]
    asked = _read(await state.bodies.read_object(request))
    name = request.match_info["request_id"]
    headers = state.note_ignored(asked.ignored)
    request_id = _request_id(state, name)
    if not state.engine.num_live(request_id):
        raise ApiError(
            ErrorKind.NOT_FOUND, f"There is no request {shown(name)} that waits or runs.", "request_id"
        )
    match asked.action:
        case "cancel":
            state.engine.abort(request_id)
        case "end_thinking":
            end_thinking(state, request_id)
        case _:
            assert asked.priority is not None
            state.engine.set_priority(request_id, asked.priority)
    return json_reply({"id": name, "action": asked.action, "done": True}, headers)


def _read(members: dict[str, object]) -> _Asked:
    """Check a body. ApiError (400) naming the field."""
    fields = Fields(members)
    action = fields.choice("action", ACTIONS)
    if action is None:
        raise fields.refuse("action", f"is missing; it is one of {', '.join(ACTIONS)}")
    priority = fields.integer("priority")
    if (priority is not None) != (action == "set_priority"):
        raise fields.refuse("priority", "goes with the action set_priority, and only with that")
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise bad_request(
            "priority", f"priority must be in -{MAX_PRIORITY} … {MAX_PRIORITY}, got {shown(priority)}"
        )
    return _Asked(action, priority, fields.unread())


def _request_id(state: ApiState, name: str) -> str:
    """The request's own id, from it or its reply's. What clients choose may begin as a reply's id does."""
    if name in state.running_responses:
        return state.running_responses[name]
    bare = [name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)]
    return next((each for each in (name, *bare) if state.engine.num_live(each)), name)
