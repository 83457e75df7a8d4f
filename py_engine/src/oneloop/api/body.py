"""Reading a request's body: JSON only, bounded in size (after decompression) and in time."""

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
        raise bad_request(None, "The body is cut or wrongly chunked.") from None
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
    """All of the body, never more than `limit` bytes of it."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return await _joined(_received(request, limit), limit)
    if encoding in ("gzip", "x-gzip", "deflate"):
        return await _joined(_inflated(_received(request, limit)), limit)
    raise bad_request(None, "The body may be packed with gzip or deflate only (Content-Encoding).")


async def _joined(chunks: AsyncIterator[bytes], limit: int) -> bytes:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


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
