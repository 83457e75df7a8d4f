"""Typed, bounded access to the values of a JSON object, errors naming file and key."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

from oneloop.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


class JsonValues:
    """A JSON object of a model file. A key that is absent or null has the default; without one it is an error."""

    def __init__(self, file: str, values: Mapping[str, Any], *, prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: object) -> bool:
        """Present and not null."""
        return self.raw(str(key)) is not None

    def raw(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._values.get(key)

    def has_null(self, key: str) -> bool:
        """Written in the file, as null."""
        return key in self._values and self._values[key] is None

    def fail(self, key: str, message: str) -> NoReturn:
        """Raise the ModelError for this key."""
        raise ModelError(self.file, message, item=self._prefix + key)

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, f"is {_short(value)}, a whole number is needed")
        if not low <= value <= high:
            self.fail(key, f"{value} is out of range, {low} to {high} are possible")
        return value

    def real(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, f"is {_short(value)}, a number is needed")
        if (isinstance(value, float) and not isfinite(value)) or not low <= value <= high:
            self.fail(key, f"{value} is out of range, {low} to {high} are possible")
        return float(value)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"is {_short(value)}, true or false is needed")
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {_short(value)}, a string is needed")
        return value

    def object(self, key: str) -> JsonValues:
        """A nested object; its keys are shown as key.name in errors."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            self.fail(key, f"is {_short(value)}, an object is needed")
        return JsonValues(self.file, value, prefix=f"{self._prefix}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "this key is missing")
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
