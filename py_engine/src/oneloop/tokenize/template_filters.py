"""Jinja's filters and tests with bounds, for those whose cost or result can exceed their input."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from oneloop.tokenize.template_limits import Meter, TemplateLimitError, require_width, weigh, weigh_comparison

Function = Callable[..., Any]

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
"""Jinja's names of the comparison operators."""

_TEST_NAMES = {
    **dict.fromkeys(("==", "eq", "equalto"), "eq"),
    **dict.fromkeys(("!=", "ne"), "ne"),
    **dict.fromkeys(("<", "lt", "lessthan"), "lt"),
    **dict.fromkeys((">", "gt", "greaterthan"), "gt"),
    **dict.fromkeys(("<=", "le"), "lteq"),
    **dict.fromkeys((">=", "ge"), "gteq"),
    "in": "in",
}
"""Names of the tests that compare → the comparison."""

_DEEP = ("dictsort", "groupby", "max", "min", "pprint", "sort", "string", "sum", "unique", "urlencode")
"""Filters that look at everything inside their arguments."""

_NARROW = ("batch", "list", "round", "slice")
"""Filters that take widths, or cut a text into a list."""

_DROPPED = ("center", "random", "truncate", "urlize", "wordwrap", "xmlattr")
"""For web pages; no chat template has a use for them, and each would need a bound of its own."""

_CUT_COST = 8
"""A text cut into characters costs a list entry each."""


def bounded_filters(filters: Mapping[str, Function], meter: Meter) -> dict[str, Function]:
    """The same filters, bounded; without those that are dropped."""
    bounded = {name: function for name, function in filters.items() if name not in _DROPPED}
    bounded |= {name: _deep(filters[name]) for name in _DEEP}
    bounded |= {name: _narrow(filters[name], meter) for name in _NARROW}
    bounded["format"] = _format(meter)
    bounded["indent"] = _indent(filters["indent"], meter)
    bounded["join"] = _join(filters["join"], meter)
    bounded["replace"] = _replace(meter)
    bounded["tojson"] = tojson
    return bounded


def comparing_tests() -> dict[str, Function]:
    """The tests that compare; they weigh containers first."""
    return {name: _comparing(COMPARISONS[kind]) for name, kind in _TEST_NAMES.items()}


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps without the escaping for HTML, as transformers has it."""
    weigh(value)
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 64):
        raise TemplateLimitError("tojson: indent must be 0 to 64")
    for separator in separators or ():
        require_width(len(separator))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _comparing(compare: Callable[[Any, Any], Any]) -> Function:
    def test(left: Any, right: Any) -> Any:
        weigh_comparison(left, right)
        return compare(left, right)

    return test


def _deep(function: Function) -> Function:
    def deep(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            weigh(value)
        return function(*args, **kwargs)

    return _marked_like(function, deep)


def _narrow(function: Function, meter: Meter) -> Function:
    def narrow(*args: Any, **kwargs: Any) -> Any:
        # the first argument is a number to round, or Jinja's own context
        for value in (*args[1:], *kwargs.values()):
            require_width(value)
        for value in args:
            if isinstance(value, str):
                meter.require(len(value) * _CUT_COST)
        return function(*args, **kwargs)

    return _marked_like(function, narrow)


def _format(meter: Meter) -> Function:
    def format_text(value: str, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TypeError("format takes values by position or by name, not both")
        meter.format(str(value), kwargs or args)
        return str(value) % (kwargs or args)

    return format_text


def _indent(function: Function, meter: Meter) -> Function:
    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        require_width(width)
        size = len(width) if isinstance(width, str) else width
        meter.require(len(s) + (s.count("\n") + 1) * size)
        return function(s, width, first, blank)

    return indent


def _join(function: Function, meter: Meter) -> Function:
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        entries = list(value)
        meter.join(str(d), entries)
        return function(eval_ctx, entries, d, attribute)

    return _marked_like(function, join)


def _replace(meter: Meter) -> Function:
    def replace(s: Any, old: str, new: str, count: int | None = None) -> str:
        weigh(s)
        text, old, new = str(s), str(old), str(new)
        meter.replace(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    return replace


def _marked_like(original: Function, wrapper: Function) -> Function:
    """jinja2 marks filters that want the context or environment by an attribute of the function."""
    wrapper.__dict__.update(original.__dict__)
    return wrapper
