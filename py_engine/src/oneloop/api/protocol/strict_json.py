"""A request body to JSON values: strict, and bounded before anything in proportion to its content is built."""

from __future__ import annotations

import json
import math

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

_MAX_SECOND_READING_BYTES = 1 << 16
_MAX_NAME_CHARS = 64


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
        if field := _field_without_finite_number(body):
            raise bad_request(field, f"{field} must hold finite numbers only: no NaN, no infinity.") from None
        raise bad_request(None, f"The body is not valid JSON: {error.msg} at byte {error.pos}.") from None
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object.")
    return value


_NOT_FINITE = object()


def _field_without_finite_number(body: bytes) -> str | None:
    """Which top-level member of a body that is no JSON holds NaN, an infinity or a number beyond a double.

    None where that is not what is wrong with it, or where it is too large to be read a second time on the loop.
    """
    if len(body) > _MAX_SECOND_READING_BYTES:
        return None
    bad: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> object:
        # Inner objects come first, so the last call is the outermost object's.
        bad[:] = [name for name, value in pairs if _holds_not_finite(value)]
        return _NOT_FINITE if bad else None

    def number(text: str) -> object:
        return None if math.isfinite(float(text)) else _NOT_FINITE

    reader = json.JSONDecoder(
        object_pairs_hook=note,
        parse_float=number,
        parse_int=lambda _: None,
        parse_constant=lambda _: _NOT_FINITE,
    )
    try:
        reader.decode(body.decode())
    except (ValueError, RecursionError):
        return None
    return bad[0] if bad and bad[0].isidentifier() and len(bad[0]) <= _MAX_NAME_CHARS else None


def _holds_not_finite(value: object) -> bool:
    """Whether a value of the second reading is marked, or is a list of lists that holds a mark."""
    if isinstance(value, list):
        return any(_holds_not_finite(item) for item in value)
    return value is _NOT_FINITE
