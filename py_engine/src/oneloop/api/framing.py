"""What other HTTP software may read differently than we do, beyond what the parser refuses by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aiohttp import HttpVersion10, HttpVersion11, hdrs

if TYPE_CHECKING:
    from aiohttp import HttpVersion
    from multidict import CIMultiDictProxy

_HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


def framing_fault(version: HttpVersion, headers: CIMultiDictProxy[str]) -> str | None:
    """What the client is told of it; None: a request that everybody reads alike."""
    if version not in (HttpVersion10, HttpVersion11):
        return "This server speaks HTTP/1.1."
    if hdrs.TRANSFER_ENCODING in headers:
        codings = [coding.lower() for coding in headers.getall(hdrs.TRANSFER_ENCODING)]
        if codings != ["chunked"]:
            return "The only Transfer-Encoding this server reads is chunked."
    host = headers.get(hdrs.HOST)
    if (host is None and version == HttpVersion11) or (host and not _HOST.fullmatch(host)):
        return "The Host header is missing or malformed."
    return None
