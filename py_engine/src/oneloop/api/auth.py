"""The API key. Denied by default: decided on the handler the router chose, never on the text of the path."""

from __future__ import annotations

import hashlib
import hmac
import secrets
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

    def admits(self, authorization: list[str], api_keys: list[str] | None = None) -> bool:
        """Whether the key was sent, at least once and by no header twice, and nothing else was sent as one.

        authorization: the `Authorization` values, all there are: `Bearer <key>`. api_keys: those of `X-Api-Key`.
        """
        if self._digest is None:
            return True
        is_wrong = len(authorization) > 1 or len(api_keys or ()) > 1
        sent = [value[len(_SCHEME) :] for value in authorization] + (api_keys or [])
        is_wrong |= any(value[: len(_SCHEME)] != _SCHEME for value in authorization)
        same = [hmac.compare_digest(_digest(key), self._digest) for key in sent or [""]]
        return all(same) and not is_wrong

    def check(self, request: web.Request) -> None:
        """Raise the 401 unless the request carries the key."""
        headers = request.headers
        if not self.admits(headers.getall("Authorization", []), headers.getall("X-Api-Key", [])):
            raise ApiError(ErrorKind.UNAUTHORIZED, "Unauthorized", None, {"WWW-Authenticate": "Bearer"})


class Owners:
    """Whose a thing is that outlives its request: a tag of the key that was sent, from which no key can be told."""

    __slots__ = ("_key_is_set", "_salt")

    def __init__(self, api_key: str | None) -> None:
        """None: everybody is the same owner."""
        self._key_is_set = api_key is not None
        self._salt = secrets.token_bytes(32)

    def of(self, request: web.Request) -> bytes:
        """The owner of what a request makes that was let in."""
        if not self._key_is_set:
            return b""
        authorization = request.headers.get("Authorization")
        key = request.headers.get("X-Api-Key", "") if authorization is None else authorization[len(_SCHEME) :]
        return hmac.digest(self._salt, _digest(key), "sha256")


def _digest(key: str) -> bytes:
    """SHA-256 of a key; header bytes that are no UTF-8 arrive as surrogates and must not raise."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
