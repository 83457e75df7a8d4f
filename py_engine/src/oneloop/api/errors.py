"""Every error a client can get: one table from kind to status and type, one way to write the body.

Messages are fixed strings plus what the client sent in a bounded form; nothing of this machine ever gets in.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from oneloop.errors import (
    EngineClosedError,
    EngineDeadError,
    GenerationError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


log = logging.getLogger(__name__)


class ErrorKind(Enum):
    """Kind of an error → (HTTP status, `type` on the wire)."""

    BAD_REQUEST = (400, "BadRequestError")
    UNAUTHORIZED = (401, "AuthenticationError")
    NOT_FOUND = (404, "NotFoundError")
    METHOD_NOT_ALLOWED = (405, "MethodNotAllowedError")
    TIMEOUT = (408, "RequestTimeoutError")
    TOO_LARGE = (413, "PayloadTooLargeError")
    MEDIA_TYPE = (415, "UnsupportedMediaTypeError")
    EXPECTATION = (417, "ExpectationFailedError")
    INTERNAL = (500, "InternalServerError")
    UNAVAILABLE = (503, "ServiceUnavailableError")

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def type(self) -> str:
        """The `type` of the body."""
        return self.value[1]


SERVER_NAME = "oneloop"
"""The Server header: neither our version nor what we stand on."""
INTERNAL_MESSAGE = "The server failed on this request; the reason is in its log."
GENERATION_FAILED = "Generation failed in the engine; the request may be sent again."


@dataclass(slots=True)
class ApiError(Exception):
    """An error on its way to the client. `param` is the request field it is about."""

    kind: ErrorKind
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ends_connection: bool = False

    def __str__(self) -> str:
        return self.message


def bad_request(param: str | None, message: str) -> ApiError:
    """A 400 about one field (None: the body as a whole)."""
    return ApiError(ErrorKind.BAD_REQUEST, message, param)


def shutting_down(message: str | None = None) -> ApiError:
    """A 503 of a server that stops. message: None: for who was not begun with."""
    error = ShuttingDownError()
    headers = {"Retry-After": str(error.retry_after_s)}
    return ApiError(ErrorKind.UNAVAILABLE, message or str(error), None, headers, ends_connection=True)


def error_body(error: ApiError) -> dict[str, Any]:
    """The object of the wire format; `code` repeats the status."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind.type,
            "param": error.param,
            "code": error.kind.status,
        }
    }


def error_bytes(error: ApiError) -> bytes:
    """The body as JSON. 401 is the one short form that gateways in front of such servers match on."""
    if error.kind is ErrorKind.UNAUTHORIZED:
        return b'{"error":"Unauthorized"}'
    return orjson.dumps(error_body(error))


def error_response(error: ApiError, *, close: bool = False) -> web.Response:
    """The HTTP reply; `close` ends the connection after it, as some errors do by themselves."""
    response = web.Response(
        status=error.kind.status,
        body=error_bytes(error),
        content_type="application/json",
        headers={"Server": SERVER_NAME, **error.headers},
    )
    if close or error.ends_connection:
        response.force_close()
    return response


def told(error: Exception, request_id: str) -> ApiError:
    """What the client is told; our own bugs go to the log in full and to the client in one fixed sentence."""
    known = from_exception(error)
    if known is None:
        log.error("request %s failed", request_id, exc_info=error)
        return ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE)
    return known


def from_exception(error: Exception) -> ApiError | None:
    """What the client is told of an error from the engine or from aiohttp; None: a bug of ours (500)."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(ErrorKind.BAD_REQUEST, error.message, error.field)
        case ShuttingDownError() | EngineClosedError():
            return shutting_down()
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(ErrorKind.UNAVAILABLE, str(error), None, headers)
        case EngineDeadError():
            return ApiError(ErrorKind.UNAVAILABLE, "The engine has stopped; nothing is served any more.")
        case GenerationError():
            return ApiError(ErrorKind.INTERNAL, GENERATION_FAILED)
        case web.HTTPException():
            return _from_http_exception(error)
        case _:
            return None


def _from_http_exception(error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals (routing, body size) in our form."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ApiError(
                ErrorKind.METHOD_NOT_ALLOWED, f"This route allows: {allowed}.", None, {"Allow": allowed}
            )
        case web.HTTPNotFound():
            return ApiError(ErrorKind.NOT_FOUND, "There is no such route.")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(ErrorKind.TOO_LARGE, "The body is larger than this server accepts.")
        case web.HTTPExpectationFailed():
            return ApiError(ErrorKind.EXPECTATION, "The only Expect this server knows is 100-continue.")
        case _ if 400 <= error.status < 500:
            return bad_request(None, "The request cannot be read.")
        case _:
            return ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE)
