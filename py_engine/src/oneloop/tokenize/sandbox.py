"""The Jinja environment chat templates run in: transformers' dialect, sandboxed, and bounded in size.

A template comes with a model, so it is data from outside. Jinja's immutable sandbox keeps it away from Python's
internals; `run_limited` ends loops. Here is bounded what one step inside C may cost, because a time limit cannot
interrupt it: whatever copies, formats or compares deeply is weighed first (see template_limits).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from oneloop.tokenize.template_filters import COMPARISONS, bounded_filters, comparing_tests
from oneloop.tokenize.template_limits import (
    MAX_WEIGHT,
    Meter,
    TemplateLimitError,
    require_width,
    weigh,
    weigh_comparison,
)

_DROPPED_METHODS = ("center", "encode", "expandtabs", "format_map", "translate")
_CUT_COST = 8
"""str.split and its kin make one object for every part of a text."""
_PIECES_AT_ONCE = 4096


class TemplateRefusalError(TemplateError):
    """The template itself called raise_exception."""


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
        self._meter = Meter()
        self.finalize = self._finalize
        self.filters = bounded_filters(self.filters, self._meter)
        tests: dict[str, Any] = {**self.tests, **comparing_tests()}
        self.tests = tests
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _make_dict,
            "namespace": _TemplateNamespace,
        }

    def _finalize(self, value: Any) -> Any:
        """Called with everything that is printed."""
        if isinstance(value, str):
            self._meter.require(len(value))
        else:
            weigh(value)
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """What joins the pieces of a rendered template, macro or block."""
        pieces: list[str] = []
        length, source = 0, iter(parts)
        while some := list(islice(source, _PIECES_AT_ONCE)):
            pieces += some
            length += sum(map(len, some))
            if length + len(pieces) > MAX_WEIGHT:  # a loop without end is stopped while it is still small
                break
        self._meter.require(length + len(pieces))
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
            weigh_comparison(left, right)
            result = COMPARISONS[name](left, right)
            if not result:
                break
            left = right
        return result

    def call_binop(self, context: Context, symbol: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%` where the result has a bounded size."""
        if symbol == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self._meter.require(len(left) + len(right))
        elif symbol == "*":
            self._meter.product(left, right)
        elif symbol == "**":
            self._meter.power(left, right)
        elif isinstance(left, str):
            self._meter.format(left, right)
        return super().call_binop(context, symbol, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of strings and containers are checked like operators."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict):
            self._check_method(owner, function.__name__, args)
        return super().call(context, function, *args, **kwargs)

    def _check_method(self, owner: Any, name: str, args: Sequence[Any]) -> None:
        if name in _DROPPED_METHODS:
            raise SecurityError(f"templates may not call {name}()")
        if not isinstance(owner, str):
            if name in ("count", "index"):
                weigh(owner)
                weigh(tuple(args))
        elif name in ("ljust", "rjust", "zfill"):
            for value in args:
                require_width(value)
        elif name in ("split", "rsplit", "splitlines"):
            self._meter.require(len(owner) * _CUT_COST if len(owner) > 1 << 16 else len(owner))
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self._meter.join(owner, args[0])
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._meter.replace(owner, args[0], args[1])

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format with bounded widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template: str = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            self._meter.format(template, (args, kwargs))
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
    raise TemplateRefusalError(str(message)[:1000])


def _strftime_now(layout: str) -> str:
    """Local time, as in transformers."""
    if len(layout) > 256 or re.search(r"%[^a-zA-Z%]*\d", layout):
        raise TemplateLimitError("strftime_now: a short format without widths is needed")
    return datetime.now().strftime(layout)
