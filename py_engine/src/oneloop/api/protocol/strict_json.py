"""A request body to JSON values: strict, and bounded before anything in proportion to its content is built."""

from __future__ import annotations

import orjson

from oneloop.api.errors import bad_request

MAX_JSON_COMMAS = 1 << 18
"""Bounds the values of a body, so that decoding never holds the loop for long. Counted on the raw bytes, commas inside
strings included: memchr speed. A list of 256k token ids fits."""

MAX_JSON_BRACKETS = 1 << 16
"""Bounds the arrays and objects of a body; brackets inside strings are counted too."""

MAX_JSON_COLONS = 1 << 16
"""Bounds the members of a body's objects, the dearest of values: a key costs about 0.4 µs. Colons inside strings are
counted too."""


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`.

    orjson refuses what JSON does not have: NaN, Infinity, numbers beyond a double, invalid UTF-8, lone surrogates, a
    byte order mark, trailing data, nesting beyond 1024. Integers beyond 64 bits become floats, which the field
    readers refuse as out of range. Of duplicate keys the last one counts. ApiError (400) for everything else.
    """
    if not body.strip():
        raise bad_request(None, "The body is empty; send a JSON object.")
    if body.count(b",") > MAX_JSON_COMMAS:
        raise bad_request(None, f"The body has more than {MAX_JSON_COMMAS} values.")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_BRACKETS:
        raise bad_request(None, f"The body has more than {MAX_JSON_BRACKETS} arrays and objects.")
    if body.count(b":") > MAX_JSON_COLONS:
        raise bad_request(None, f"The body has more than {MAX_JSON_COLONS} members of objects.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(None, f"The body is not valid JSON: {error.msg} at byte {error.pos}.") from None
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.")
    return value
