"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from oneloop.api.errors import ErrorKind

if TYPE_CHECKING:
    from oneloop.api.errors import ApiError

PATH = "/v1/messages"
"""The routes at and below it have errors of this form, whatever goes wrong."""

_TYPES = {
    ErrorKind.UNAUTHORIZED: "authentication_error",
    ErrorKind.FORBIDDEN: "permission_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.TIMEOUT: "timeout_error",
    ErrorKind.TOO_LARGE: "request_too_large",
    ErrorKind.INTERNAL: "api_error",
    ErrorKind.UNAVAILABLE: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """The body, and the data of an `error` event."""
    kind = _TYPES.get(error.kind, "invalid_request_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }
    return orjson.dumps(body)


def has_anthropic_errors(path: str) -> bool:
    """Whether a path is one of these routes."""
    return path == PATH or path.startswith(PATH + "/")
