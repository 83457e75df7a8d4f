"""Reading a request's body: JSON only, bounded in size (after decompression), in time, and over all connections."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from aiohttp import http_exceptions, web

from oneloop.api.errors import ApiError, ErrorKind, bad_request
from oneloop.api.limits import BODY_TIMEOUT_S
from oneloop.api.protocol.strict_json import decode_object

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oneloop.api.limits import Limits

_UTF8 = ("utf-8", "utf8", "us-ascii")
_INFLATED_AT_ONCE = 256 << 10
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


NOT_COUNTED = 64 << 10
"""The first bytes of every body are outside the common bound: small requests are read whatever the large ones do."""
MAX_LARGE_BODIES = 16
"""Bodies of full size that are held at once, over all connections; in bytes, so smaller ones are more."""


class BodyReader:
    """Reads bodies for all handlers, and bounds what all of them hold together."""

    __slots__ = ("_limits", "_num_held")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_held = 0

    async def read_object(self, request: web.Request) -> dict[str, object]:
        """The JSON object a client sent. ApiError 400, 408, 413, 415 or 503."""
        _check_media_type(request)
        limit = self._limits.max_body_bytes
        whole = _whole(request, limit)
        if whole is not None:
            return decode_object(whole)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in _chunks(request, limit):
                    if len(body) + len(chunk) > limit:
                        raise _too_large(limit)
                    self._hold(len(body), len(body) + len(chunk))
                    body += chunk
            return decode_object(bytes(body))
        except TimeoutError:
            raise ApiError(
                ErrorKind.TIMEOUT, f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds."
            ) from None
        except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
            raise ApiError(
                ErrorKind.BAD_REQUEST, "The body is cut or wrongly chunked.", ends_connection=True
            ) from None
        finally:
            self._num_held -= _counted(len(body))

    def _hold(self, num_before: int, num_bytes: int) -> None:
        """A body grows. ApiError 503 when all together would be too large."""
        more = _counted(num_bytes) - _counted(num_before)
        if self._num_held + more > MAX_LARGE_BODIES * self._limits.max_body_bytes:
            raise ApiError(
                ErrorKind.UNAVAILABLE,
                "Too many large bodies are on their way; try again later.",
                None,
                {"Retry-After": "1"},
            )
        self._num_held += more


def _counted(num_bytes: int) -> int:
    return max(num_bytes - NOT_COUNTED, 0)


def _check_media_type(request: web.Request) -> None:
    """application/json (or …+json) in UTF-8. A form that a browser can send across sites is not taken."""
    kind = request.content_type if "Content-Type" in request.headers else ""
    charset = (request.charset or "utf-8").lower()
    if (kind != "application/json" and not kind.endswith("+json")) or charset not in _UTF8:
        raise ApiError(
            ErrorKind.MEDIA_TYPE, "The body must be JSON: send Content-Type: application/json (UTF-8)."
        )


def _whole(request: web.Request, limit: int) -> bytes | None:
    """The body, if it came with its headers and is small: then nothing needs to be waited for or counted."""
    length, content = request.content_length, request.content
    if length is None or length > min(limit, NOT_COUNTED) or not content.is_eof():
        return None
    if "Content-Encoding" in request.headers or content.exception() is not None:
        return None
    return content.read_nowait(-1)


def _chunks(request: web.Request, limit: int) -> AsyncIterator[bytes]:
    """The body, unpacked, piece by piece; of the packed one never more than `limit` bytes."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return _received(request, limit)
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _inflated(_received(request, limit))
    raise bad_request(None, "The body may be packed with gzip or deflate only (Content-Encoding).")


async def _received(request: web.Request, limit: int) -> AsyncIterator[bytes]:
    """The bytes as they arrive."""
    num_bytes = 0
    while chunk := await request.content.readany():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_large(limit)
        yield chunk


async def _inflated(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Unpacked here rather than by aiohttp: in small steps that let others run in between."""
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        async for chunk in chunks:
            packed = chunk
            while packed:
                if inflater.eof:
                    raise bad_request(None, "The body goes on after its packed data.")
                yield inflater.decompress(packed, _INFLATED_AT_ONCE)
                packed = inflater.unconsumed_tail or inflater.unused_data
                await asyncio.sleep(0)
        yield inflater.flush()
    except zlib.error:
        raise bad_request(None, "The body is not what its Content-Encoding says.") from None
    if not inflater.eof:
        raise bad_request(None, "The body ends before its packed data does.")


def _too_large(limit: int) -> ApiError:
    return ApiError(ErrorKind.TOO_LARGE, f"The body may have at most {limit} bytes, after decompression.")
