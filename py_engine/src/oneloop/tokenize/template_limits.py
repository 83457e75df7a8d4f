"""What one chat template may cost: the size of single values, and of everything one render makes."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

MAX_WEIGHT = 1 << 23
"""Characters (and 16 for each container) that one value, and a whole rendered prompt, may hold."""

_MAX_TOTAL = 8 * MAX_WEIGHT
_MAX_WIDTH = 4096
_MAX_DEPTH = 100
_MAX_INTEGER_BITS = 4096
_CONTAINERS = (list, tuple, dict, set, frozenset)
_LONG_WIDTH = re.compile(r"%[^%a-zA-Z]*\d{5}|\{[^{}]*\d{5}")
_COMPUTED_WIDTH = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*\{")


class TemplateLimitError(TemplateRuntimeError):
    """A template that would need more memory than a prompt can be worth."""


def weigh(value: object, budget: int = MAX_WEIGHT, depth: int = _MAX_DEPTH) -> int:
    """What is left of the budget after the value; TemplateLimitError when it is not enough.

    Walks in Python, so a structure that shares itself (a billion laughs) meets the budget or the time limit.
    """
    if isinstance(value, str | bytes):
        budget -= len(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        budget -= value.bit_length() >> 3
    elif isinstance(value, _CONTAINERS):
        if depth == 0:
            raise TemplateLimitError(f"a value is nested deeper than {_MAX_DEPTH} levels")
        budget -= 16
        if isinstance(value, Mapping):
            for key, entry in value.items():
                budget = weigh(entry, weigh(key, budget, depth - 1), depth - 1)
        else:
            for entry in value:
                budget = weigh(entry, budget, depth - 1)
    if budget < 0:
        raise TemplateLimitError("the template builds a value that is too large")
    return budget


def require_width(value: object) -> None:
    """A number that says how wide something is printed."""
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise TemplateLimitError(f"the template asks for a width over {_MAX_WIDTH}")


def weigh_comparison(left: object, right: object) -> None:
    """Scalars compare at once; only two containers can take long."""
    if isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
        weigh(left)
        weigh(right)


class Meter(threading.local):
    """Sums up what a render has made. Each render runs in a thread of its own, so each begins at zero."""

    def __init__(self) -> None:
        self.total = 0

    def require(self, size: int) -> None:
        """Before a value of `size` characters or entries is made."""
        self.total += size
        if size > MAX_WEIGHT or self.total > _MAX_TOTAL:
            raise TemplateLimitError("the template builds a value that is too large")

    def product(self, left: Any, right: Any) -> None:
        """Before left * right."""
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
                raise TemplateLimitError("the template computes a number that is too large")
            return
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                self.require(len(sequence) * max(count, 0))

    def power(self, base: Any, exponent: Any) -> None:
        """Before base ** exponent."""
        if (
            isinstance(base, int)
            and isinstance(exponent, int)
            and base.bit_length() * exponent > _MAX_INTEGER_BITS
        ):
            raise TemplateLimitError("the template computes a number that is too large")

    def format(self, template: str, values: Any) -> None:
        """Before `%` and str.format: no width over 9999, none computed, and the sum of all fields bounded."""
        if _LONG_WIDTH.search(template) or _COMPUTED_WIDTH.search(template):
            raise TemplateLimitError("the template formats with a width that is too large or computed")
        fields = template.count("{") + template.count("%")
        self.require(len(template) + fields * (MAX_WEIGHT - weigh(values)))

    def replace(self, text: str, old: str, new: str) -> None:
        """Before text.replace(old, new)."""
        self.require(len(text) + text.count(old) * len(new))

    def join(self, separator: str, entries: Any) -> None:
        """Before separator.join(entries)."""
        self.require(MAX_WEIGHT - weigh(entries) + len(entries) * len(separator))
