"""A JSON reply, and the header that lists request fields without effect."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SAFE_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
_MAX_NAMES = 32


def json_reply(value: object, headers: Mapping[str, str] | None = None) -> web.Response:
    """200 with a JSON body."""
    return web.Response(body=orjson.dumps(value), content_type="application/json", headers=headers)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """`X-Oneloop-Ignored`: fields that were accepted without effect. Names that are no plain words are counted only."""
    if not names:
        return {}
    safe = [name for name in names[:_MAX_NAMES] if _SAFE_NAME.fullmatch(name)]
    more = len(names) - len(safe)
    return {"X-Oneloop-Ignored": ", ".join([*safe, f"(+{more} more)"] if more else safe)}
