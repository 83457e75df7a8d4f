"""The Jinja environment chat templates run in: transformers' dialect, sandboxed, and bounded in size.

A template comes with a model, so it is data from outside. Jinja's immutable sandbox keeps it away from Python's
internals; `time_limit` ends loops. This module bounds what one step inside C may cost, because a time limit cannot
interrupt it: every value handed to an operation that copies, formats or compares it deeply weighs at most
MAX_WEIGHT, and operations whose result can be larger than their input are computed only when it is not too large.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_WEIGHT = 1 << 23
"""Characters (and 16 for each container) that one value, and a whole rendered prompt, may hold."""

_MAX_WIDTH = 4096
_CUT_COST = 8
"""A text cut into characters costs a list entry each."""
_MAX_INTEGER_BITS = 4096
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
_LONG_WIDTH = re.compile(r"%[^%a-zA-Z]*\d{5}|\{[^{}]*\d{5}")
_COMPUTED_WIDTH = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*\{")

_DEEP_FILTERS = (
    "dictsort",
    "format",
    "groupby",
    "max",
    "min",
    "pprint",
    "sort",
    "string",
    "sum",
    "unique",
    "urlencode",
)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DROPPED_FILTERS = ("center", "random", "truncate", "urlize", "wordwrap", "xmlattr")
"""For web pages; no chat template has a use for them, and each would need a bound of its own."""
_DROPPED_METHODS = ("center", "encode", "expandtabs", "format_map", "translate")
_TEST_NAMES = {
    **dict.fromkeys(("==", "eq", "equalto"), "eq"),
    **dict.fromkeys(("!=", "ne"), "ne"),
    **dict.fromkeys(("<", "lt", "lessthan"), "lt"),
    **dict.fromkeys((">", "gt", "greaterthan"), "gt"),
    "<=": "lteq",
    "le": "lteq",
    ">=": "gteq",
    "ge": "gteq",
    "in": "in",
}
"""Names of the tests that compare → the comparison."""


class TemplateLimitError(TemplateRuntimeError):
    """A template that would need more memory than a prompt can be worth."""


class TemplateRefusalError(TemplateError):
    """The template itself called raise_exception."""


def weigh(value: object, budget: int = MAX_WEIGHT) -> int:
    """What is left of the budget after the value; TemplateLimitError when it is not enough.

    Walks in Python, so a structure that shares itself (a billion laughs) meets the budget or the time limit.
    """
    if isinstance(value, str | bytes):
        budget -= len(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        budget -= value.bit_length() >> 3
    elif isinstance(value, Mapping):
        budget -= 16
        for key, entry in value.items():
            budget = weigh(entry, weigh(key, budget))
    elif isinstance(value, list | tuple | set | frozenset):
        budget -= 16
        for entry in value:
            budget = weigh(entry, budget)
    if budget < 0:
        raise TemplateLimitError("the template builds a value that is too large")
    return budget


def _require(size: int) -> None:
    if size > MAX_WEIGHT:
        raise TemplateLimitError("the template builds a value that is too large")


def _require_width(value: object) -> None:
    if isinstance(value, int) and abs(value) > _MAX_WIDTH:
        raise TemplateLimitError(f"the template asks for a width of {value}; at most {_MAX_WIDTH} is allowed")


def _weigh_comparison(left: object, right: object) -> None:
    """Scalars compare at once; only two containers can take long."""
    if isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
        weigh(left)
        weigh(right)


class _BoundedCodeGenerator(CodeGenerator):
    """Routes `~` and comparisons, which the sandbox does not intercept, through the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.bounded_concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("environment.compare(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", ({operand.op!r}, ")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' template dialect with bounded operations."""

    code_generator_class = _BoundedCodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.finalize = _finalize
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _make_dict,
            "namespace": _TemplateNamespace,
        }
        del self.globals["lipsum"]
        for name in _DROPPED_FILTERS:
            del self.filters[name]
        for name in _DEEP_FILTERS:
            self.filters[name] = _weighing(self.filters[name])
        for name in _TEST_NAMES:
            self.tests[name] = _weighing_test(_COMPARISONS[_TEST_NAMES[name]])
        self.filters |= {"tojson": _tojson, "join": _join(self.filters["join"])}
        self.filters |= {"replace": _replace, "indent": _indent(self.filters["indent"])}
        self.filters |= {name: _narrow(self.filters[name]) for name in ("batch", "list", "round", "slice")}

    def concat(self, parts: Iterable[str]) -> str:
        """What joins the pieces of a rendered template, macro or block."""
        pieces = list(parts)
        _require(sum(map(len, pieces)))
        return "".join(pieces)

    def bounded_concat(self, parts: Sequence[Any]) -> str:
        """The operator `~`."""
        for part in parts:
            weigh(part)
        return self.concat([str(part) for part in parts])

    def compare(self, left: Any, *steps: tuple[str, Any]) -> Any:
        """A chain of comparisons, as in `a < b <= c`."""
        result: Any = True
        for name, right in steps:
            _weigh_comparison(left, right)
            result = _COMPARISONS[name](left, right)
            if not result:
                break
            left = right
        return result

    def call_binop(self, context: Context, symbol: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%` where the result has a bounded size."""
        if symbol == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _require(len(left) + len(right))
        elif symbol == "*":
            _check_product(left, right)
        elif symbol == "**":
            if (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > _MAX_INTEGER_BITS
            ):
                raise TemplateLimitError("the template computes a number that is too large")
        elif isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, symbol, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of strings and containers are checked like operators."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict):
            _check_method(owner, function.__name__, args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(template, [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: marks assistant text for training; prints its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """namespace() without names that begin with an underscore, which Python gives meanings of its own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("the template stores a namespace name that begins with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """dict(…) as a function: the type itself stays out of the template's reach."""
    return dict(*args, **kwargs)


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 256 or re.search(r"%[^a-zA-Z%]*\d", layout):
        raise TemplateLimitError("strftime_now: a short format without widths is needed")
    return datetime.now().strftime(layout)


def _finalize(value: Any) -> Any:
    """Called with everything that is printed."""
    if not isinstance(value, str):
        weigh(value)
    return value


def _tojson(
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
        _require_width(len(separator))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _weighing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter with every argument weighed; keeps jinja's marks (pass_environment …) on the function."""

    def weighed(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            weigh(value)
        if function.__name__ == "do_format" and args:
            _check_format(str(args[0]), [args[1:], kwargs])
        return function(*args, **kwargs)

    return _like(function, weighed)


def _weighing_test(function: Callable[..., Any]) -> Callable[..., Any]:
    def weighed(left: Any, right: Any) -> Any:
        _weigh_comparison(left, right)
        return function(left, right)

    return weighed


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arguments are no large numbers, and what is cut up is no long text."""

    def narrow(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            _require(len(args[0]) * _CUT_COST)
        for value in (*args[1:], *kwargs.values()):
            _require_width(value)
        return function(*args, **kwargs)

    return _like(function, narrow)


def _join(function: Callable[..., Any]) -> Callable[..., Any]:
    def join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        entries = list(value)
        weigh(entries)
        _require(len(entries) * len(str(d)))
        return function(eval_ctx, entries, d, attribute)

    return _like(function, join)


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's replace for plain strings."""
    weigh(s)
    text, old, new = str(s), str(old), str(new)
    _require(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(function: Callable[..., Any]) -> Callable[..., Any]:
    def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        _require_width(width)
        size = len(width) if isinstance(width, str) else width
        _require(len(s) + (s.count("\n") + 1) * size)
        return function(s, width, first, blank)

    return indent


def _like(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """jinja2 marks filters that want the context or environment by an attribute."""
    wrapper.__dict__.update(original.__dict__)
    return wrapper


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
            raise TemplateLimitError("the template computes a number that is too large")
        return
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            _require(len(sequence) * count)


def _check_format(template: str, values: Any) -> None:
    """`%` and str.format: no width over 9999, none computed, and the sum of all fields bounded."""
    if _LONG_WIDTH.search(template) or _COMPUTED_WIDTH.search(template):
        raise TemplateLimitError("the template formats with a width that is too large or computed")
    used = MAX_WEIGHT - weigh(values)
    fields = template.count("{") + template.count("%")
    _require(len(template) + fields * (used + 10_000))


def _check_method(owner: Any, name: str, args: Sequence[Any]) -> None:
    if name in _DROPPED_METHODS:
        raise SecurityError(f"templates may not call {name}()")
    if not isinstance(owner, str):
        weigh(args)
        weigh(owner if name in ("count", "index", "__contains__") else ())
    elif name in ("ljust", "rjust", "zfill"):
        for value in args:
            _require_width(value)
    elif name == "join":
        entries = args[0] if args and isinstance(args[0], list | tuple) else ()
        weigh(entries)
        _require(len(entries) * len(owner))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _require(len(owner) + owner.count(args[0]) * len(args[1]))
