"""Reading the values of options. Whoever gives a wrong one hears which, and what would be right."""

from __future__ import annotations

import argparse
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


MAX_TOKEN_ID: Final = 2**31 - 1


class UsageError(Exception):
    """Options that cannot work."""


@contextmanager
def as_usage_error() -> Iterator[None]:
    """A ValueError of the block is the fault of whoever gave the options."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def numbers(text: str) -> list[float]:
    """One number, or several with commas; "inf" is one."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between them are needed") from None


def number(text: str) -> float:
    """A finite number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r}: a finite number is needed")
    return found


def number_from_0(text: str) -> float:
    """A finite number that is not below 0."""
    if (found := number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of 0 or more is needed")
    return found


def number_above_0(text: str) -> float:
    """A finite number above 0."""
    if (found := number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is needed")
    return found


def whole_numbers(text: str) -> list[int]:
    """One whole number above 0, or several with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: whole numbers above 0 are needed, with commas between them"
        )
    return found


def count(text: str) -> int:
    """A whole number above 0."""
    if (found := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is needed")
    return found


def whole_number(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of 0 or more is needed")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = orjson.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return found


def number_range(text: str) -> tuple[int, int]:
    """LOW:HIGH, the end not included."""
    low, _, high = text.partition(":")
    are_whole = text.isascii() and low.isdigit() and high.isdigit()
    if not are_whole or not int(low) < int(high) <= MAX_TOKEN_ID:
        raise argparse.ArgumentTypeError(
            f"{text!r}: LOW:HIGH is needed, whole numbers up to {MAX_TOKEN_ID}, the lower one first"
        )
    return int(low), int(high)


def pairs(option: str, given: Sequence[str] | None, separator: str = "=") -> dict[str, str]:
    """KEY=VALUE of an option that may be repeated. UsageError."""
    found = {}
    for item in given or ():
        key, sign, value = item.partition(separator)
        if not sign or not key.strip():
            raise UsageError(f"{option}: {item!r} is not KEY{separator}VALUE")
        found[key.strip()] = value.strip()
    return found
