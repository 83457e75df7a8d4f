"""Reading a request's body: JSON only, bounded in size (after decompression) and in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import http_exceptions, web

from oneloop.api.errors import ApiError, ErrorKind, bad_request
from oneloop.api.limits import BODY_TIMEOUT_S
from oneloop.api.protocol.strict_json import decode_object

if TYPE_CHECKING:
    from oneloop.api.limits import Limits

_UTF8 = (None, "utf-8", "utf8", "us-ascii")


async def read_object(request: web.Request, limits: Limits) -> dict[str, object]:
    """The JSON object a client sent. ApiError 400, 408, 413 or 415."""
    _check_media_type(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            ErrorKind.TIMEOUT, f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds."
        ) from None
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        raise bad_request(None, "The body cannot be decoded: wrong chunking or compression.") from None
    return decode_object(body)


def _check_media_type(request: web.Request) -> None:
    """application/json (or …+json) in UTF-8. A form that a browser can send across sites is not taken."""
    kind = request.content_type if "Content-Type" in request.headers else ""
    charset = (request.charset or "utf-8").lower()
    if (kind != "application/json" and not kind.endswith("+json")) or charset not in _UTF8:
        raise ApiError(
            ErrorKind.MEDIA_TYPE, "The body must be JSON: send Content-Type: application/json (UTF-8)."
        )


async def _read(request: web.Request, limit: int) -> bytes:
    """All of the body; chunk by chunk, so that a packed body is never inflated beyond the limit."""
    too_large = ApiError(
        ErrorKind.TOO_LARGE, f"The body may have at most {limit} bytes, after decompression."
    )
    if (request.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > limit:
            raise too_large
        if not request.content.at_eof():
            await asyncio.sleep(0)  # the next chunk may be inflated without any waiting: let others run in between
    return bytes(body)
