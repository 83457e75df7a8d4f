"""What a client may send over the socket, and what it is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from oneloop.api.errors import error_body
from oneloop.api.protocol.fields import Fields, shown
from oneloop.api.protocol.strict_json import decode_object

if TYPE_CHECKING:
    from oneloop.api.errors import ApiError
    from oneloop.api.replies import Usage

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_CREDIT = 2**31 - 1
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a generation."""

    id: str
    endpoint: str
    body: dict[str, object]
    credit: int | None
    """How many deltas may be sent before more is granted; None: as many as the socket takes."""


@dataclass(frozen=True, slots=True)
class Credit:
    """So many more deltas may be sent."""

    id: str
    add: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a generation."""

    id: str


@dataclass(frozen=True, slots=True)
class Ping:
    """To be answered."""


Message: TypeAlias = Open | Credit | Cancel | Ping


def read_message(text: str) -> Message:
    """Check a message. ApiError (400) naming the field."""
    fields = Fields(decode_object(text.encode("utf-8", "surrogatepass")))
    kind = fields.choice("type", ("open", "credit", "cancel", "ping"))
    match kind:
        case "ping":
            return Ping()
        case "open":
            endpoint = fields.choice("endpoint", ENDPOINTS)
            if endpoint is None:
                raise fields.refuse("endpoint", f"is missing; it is one of {', '.join(ENDPOINTS)}")
            body = fields.object("body")
            if body is None:
                raise fields.refuse("body", "is missing")
            credit = fields.integer("credit")
            return Open(_id(fields), endpoint, body, None if credit is None else _credit(fields, "credit"))
        case "credit":
            return Credit(_id(fields), _credit(fields, "add"))
        case "cancel":
            return Cancel(_id(fields))
        case _:
            raise fields.refuse("type", "is missing")


def opened(generation: str, request_id: str, ignored: str | None) -> str:
    """It is queued. ignored: names of fields without effect, as in the header of that purpose."""
    message = {"type": "opened", "id": generation, "request_id": request_id}
    return _text(message if ignored is None else message | {"ignored": ignored})


def delta(generation: str, chunk: bytes) -> str:
    """A chunk, as its endpoint streams it. chunk: JSON."""
    return _text({"type": "delta", "id": generation, "chunk": orjson.Fragment(chunk)})


def done(generation: str, usage: Usage, *, cancelled: bool) -> str:
    """Nothing more of it comes."""
    return _text({"type": "done", "id": generation, "cancelled": cancelled, "usage": usage.wire()})


def failed(generation: str | None, error: ApiError) -> str:
    """It has ended with an error. generation: None where the message that is at fault was for none."""
    return _text({"type": "error", "id": generation, **error_body(error)})


PONG = '{"type":"pong"}'


def _text(message: dict[str, Any]) -> str:
    return orjson.dumps(message).decode()


def _id(fields: Fields) -> str:
    value = fields.text("id")
    if value is None or not _ID.fullmatch(value):
        raise fields.refuse("id", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    return value


def _credit(fields: Fields, key: str) -> int:
    value = fields.integer(key)
    if value is None or not 0 <= value <= MAX_CREDIT:
        given = "nothing" if value is None else shown(value)
        raise fields.refuse(key, f"must be in 0 … {MAX_CREDIT}, got {given}")
    return value
