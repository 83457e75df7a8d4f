"""Reading a JSON object field by field: right type or a 400 that names the field; what nobody read is "ignored"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from oneloop.api.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_EXACT_FLOAT = 2.0**53
"""Integers that some clients write as 16.0 are taken up to here."""


class Fields:
    """The members of one JSON object. Every reader takes null as "not given".

    path: prefix of the names in errors, for nested objects ("messages[2].").
    """

    __slots__ = ("_inner", "_members", "_path", "_read")

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._members = members
        self._path = path
        self._read: set[str] = set()
        self._inner: list[Fields] = []

    def name(self, key: str) -> str:
        """The field's full name, as `param` shows it."""
        return self._path + key

    def given(self, key: str) -> Any:
        """The raw value, None when missing or null; counts as read."""
        self._read.add(key)
        return self._members.get(key)

    def inner(self, members: Mapping[str, Any], key: str) -> Fields:
        """The members of an object within this one. What nobody reads of them counts as unread here.

        key: where it is, as `param` shows it: "stream_options", "messages[2]".
        """
        fields = Fields(members, f"{self._path}{key}.")
        self._inner.append(fields)
        return fields

    def member(self, place: str, raw: Any) -> Fields:
        """The same of an entry of a list, which must be an object. place: as "tools[0]"."""
        if type(raw) is not dict:
            raise self.refuse(place, f"must be an object, got {shown(raw)}")
        return self.inner(raw, place)

    def has(self, key: str) -> bool:
        """Whether the field is there and not null (does not count as read)."""
        return self._members.get(key) is not None

    def has_any(self, keys: Mapping[str, Any]) -> bool:
        """Whether one of the keys is there (does not count as read)."""
        return not self._members.keys().isdisjoint(keys)

    def refuse(self, key: str, message: str) -> ApiError:
        """The 400 about this field, to be raised by the caller."""
        return bad_request(self.name(key), f"{self.name(key)} {message}")

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.given(key)
        if value is not None and type(value) is not str:
            raise self.refuse(key, f"must be a string, got {shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.given(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(key, f"must be true or false, got {shown(value)}")
        return value

    def integer(self, key: str) -> int | None:
        """An integer; 16.0 counts as one."""
        value = self.given(key)
        if type(value) is float and value.is_integer() and abs(value) < _EXACT_FLOAT:
            return int(value)
        if type(value) is float and value.is_integer():
            raise self.refuse(
                key, f"must be an integer of at most 64 bits, without exponent; got {shown(value)}"
            )
        if value is not None and type(value) is not int:
            raise self.refuse(key, f"must be an integer, got {shown(value)}")
        return value

    def number(self, key: str) -> float | None:
        """A finite number (strict JSON has no other)."""
        value = self.given(key)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise self.refuse(key, f"must be a number, got {shown(value)}")
        return float(value)

    def array(self, key: str, *, at_most: int) -> list[Any] | None:
        """A list of at most so many entries."""
        value = self.given(key)
        if value is None:
            return None
        if type(value) is not list:
            raise self.refuse(key, f"must be a list, got {shown(value)}")
        if len(value) > at_most:
            raise self.refuse(key, f"may have at most {at_most} entries, got {len(value)}")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        """A JSON object."""
        value = self.given(key)
        if value is not None and type(value) is not dict:
            raise self.refuse(key, f"must be an object, got {shown(value)}")
        return value

    def shallow_object(self, key: str) -> dict[str, Any] | None:
        """A JSON object that can be written again: one that nests no deeper than orjson writes."""
        value = self.object(key)
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError:
            raise self.refuse(key, "is nested too deeply") from None
        return value

    def choice(self, key: str, allowed: Iterable[str]) -> str | None:
        """One of some strings."""
        value = self.text(key)
        if value is not None and value not in allowed:
            raise self.refuse(key, f"must be one of {', '.join(sorted(allowed))}, got {shown(value)}")
        return value

    def unread(self) -> list[str]:
        """Full names of what is given and nobody asked for: of this object in the order sent, then of inner ones."""
        own = [key for key, value in self._members.items() if key not in self._read and value is not None]
        names = [self._path + key for key in own] if self._path else own
        for fields in self._inner:
            names += fields.unread()
        return names


def shown(value: object) -> str:
    """A value as error messages show it: short, whatever was sent."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return f"'{value[:40]}…'" if len(value) > 40 else f"'{value}'"
    kind = "object" if isinstance(value, dict) else "list"
    if not value:
        return f"an empty {kind}"
    return "an object" if kind == "object" else "a list"


def integer_list(name: str, values: list[Any]) -> list[int]:
    """The list itself, when every entry is an integer. The check runs at C speed: lists may be long."""
    if set(map(type, values)) <= {int}:
        return values
    index = next(i for i, value in enumerate(values) if type(value) is not int)
    raise bad_request(name, f"{name}[{index}] must be an integer, got {shown(values[index])}")


def token_ids(name: str, values: list[Any], vocab_size: int, *, at_most: int) -> list[int]:
    """A non-empty list of ids in [0, vocab_size); the error names the first that is not. Length first: it is free."""
    if not values:
        raise bad_request(name, f"{name} must not be empty")
    if len(values) > at_most:
        raise bad_request(
            name,
            f"context_length_exceeded: {name} may have at most {at_most} tokens here, got {len(values)}.",
        )
    ids = integer_list(name, values)
    if min(ids) < 0 or max(ids) >= vocab_size:
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise bad_request(
            name, f"{name}[{index}]: token id {ids[index]} is outside the vocabulary (0 … {vocab_size - 1})"
        )
    return ids
