"""The API key. Denied by default: decided on the handler the router chose, never on the text of the path."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from oneloop.api.errors import ApiError, ErrorKind

if TYPE_CHECKING:
    from aiohttp import web

_SCHEME = "Bearer "


class KeyCheck:
    """Compares keys in constant time, on digests, so neither content nor length shows in the time taken."""

    __slots__ = ("_digest",)

    def __init__(self, api_key: str | None) -> None:
        """None: every request is let in."""
        self._digest = None if api_key is None else _digest(api_key)

    @property
    def required(self) -> bool:
        """Whether a key is set."""
        return self._digest is not None

    def admits(self, authorization: list[str]) -> bool:
        """Whether these `Authorization` values (all there are) carry the key, as `Bearer <key>`, exactly once."""
        if self._digest is None:
            return True
        value = authorization[0] if len(authorization) == 1 else ""
        scheme, key = value[: len(_SCHEME)], value[len(_SCHEME) :]
        same_key = hmac.compare_digest(_digest(key), self._digest)
        return same_key and scheme == _SCHEME

    def check(self, request: web.Request) -> None:
        """Raise the 401 unless the request carries the key."""
        if not self.admits(request.headers.getall("Authorization", [])):
            raise ApiError(ErrorKind.UNAUTHORIZED, "Unauthorized", None, {"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    """SHA-256 of a key; header bytes that are no UTF-8 arrive as surrogates and must not raise."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
