"""Typed, bounded access to the key/value part of a GGUF header."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from oneloop.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


class GgufMetadata:
    """Values by key: int, float, bool, str, list of str, numpy array of numbers, list of such lists.

    Every getter raises ModelError naming file and key when the value is missing (and no default is given), of the
    wrong type or out of range.
    """

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def fail(self, key: str, message: str) -> NoReturn:
        """Raise the ModelError for this key."""
        raise ModelError(self.file, message, item=key)

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail_type(key, value, "a whole number")
        if not low <= value <= high:
            self.fail(key, f"{value} is out of range, {low} to {high} are possible")
        return value

    def real(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail_type(key, value, "a number")
        if not isfinite(value) or not low <= value <= high:
            self.fail(key, f"{value} is out of range, {low} to {high} are possible")
        return float(value)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self._fail_type(key, value, "true or false")
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._fail_type(key, value, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings."""
        value = self._values.get(key)
        if isinstance(value, np.ndarray) and value.size == 0:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self._fail_type(key, value, "an array of strings")
        return value

    def numbers(self, key: str, length: int) -> NDArray[Any]:
        """An array of exactly `length` numbers."""
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or value.dtype == bool:
            self._fail_type(key, value, "an array of numbers")
        if value.size != length:
            self.fail(key, f"has {value.size} entries where {length} are needed")
        return value

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(key), list | np.ndarray)

    def _fail_type(self, key: str, value: object, wanted: str) -> NoReturn:
        if value is None:
            self.fail(key, f"this key is missing ({wanted})")
        self.fail(key, f"is of type {type(value).__name__}, {wanted} is needed")
