"""Plans as the text of the tables that they belong into."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Shape = tuple[int, int, bool]
Choices = tuple[tuple[int, Any], ...]


def merged(choices: Choices, found: Mapping[int, Any]) -> Choices:
    """(up to that many rows, the plan) ascending: what was found over what is there. Of plans that follow each other
    and are the same, one is left."""
    plans = {**dict(choices), **found}
    ascending = sorted(plans.items())
    return tuple(
        (most, plan)
        for (most, plan), (_, following) in zip(ascending, [*ascending[1:], (0, MISSING)], strict=True)
        if plan != following
    )


def table(tuned: Mapping[Shape, Choices], found: Mapping[Shape, Mapping[int, Any]]) -> str:
    """Lines of the table with what was found in it, shapes as they stand there, then new ones."""
    lines = []
    for shape in dict.fromkeys((*tuned, *found)):
        lines.append(f"        {shape}: (")
        choices = merged(tuned.get(shape, ()), found.get(shape, {}))
        lines += [f"            ({most}, {literal(plan)})," for most, plan in choices]
        lines.append("        ),")
    return "\n".join(lines)


def literal(plan: Any) -> str:
    """A dataclass as its constructor's call: what has no default by place, the rest by name where it is another."""
    if plan is None:
        return "None"
    values: Sequence[tuple[Any, Any]] = [(one, getattr(plan, one.name)) for one in fields(plan)]
    given = [repr(value) for one, value in values if one.default is MISSING]
    given += [
        f"{one.name}={value!r}"
        for one, value in values
        if one.default is not MISSING and value != one.default
    ]
    return f"{type(plan).__name__}({', '.join(given)})"
