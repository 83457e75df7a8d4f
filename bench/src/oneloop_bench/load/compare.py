"""Results side by side, with ratios to the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oneloop_bench.load.metrics import METRICS
from oneloop_bench.load.result import finite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIGURES: Final = (
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)
MORE_IS_BETTER: Final = frozenset(name for name in FIGURES if name.endswith(("throughput", "goodput"))) | {
    "completed"
}
MUST_AGREE: Final = ("model_id", "num_prompts", "request_rate", "max_concurrency", "dataset_name")
"""Where these differ, the figures are those of different workloads."""
KINDS: Final = ("mean", "median", "p90", "p95", "p99")
SAME: Final = 0.02
"""Ratios this near to 1 are called neither better nor worse."""


def figures_of(results: Sequence[Mapping[str, Any]], *, every: bool = False) -> list[str]:
    """Names of what any of the results has a number for: throughputs, then latencies (of KINDS, or of every kind)."""
    latencies = [
        name
        for metric in METRICS
        for result in results
        for name in result
        if name.endswith(f"_{metric}_ms") and (every or name.removesuffix(f"_{metric}_ms") in KINDS)
    ]
    names = dict.fromkeys([*FIGURES, *latencies])
    return [name for name in names if any(finite(result.get(name)) is not None for result in results)]


def table(names: Sequence[str], results: Sequence[Mapping[str, Any]], *, every: bool = False) -> str:
    """Markdown. names: a heading per result. every: all kinds of figures."""
    ratios = [f"{name} / {names[0]}" for name in names[1:]]
    rows = [["figure", *names, *ratios]]
    for figure in figures_of(results, every=every):
        values = [finite(result.get(figure)) for result in results]
        rows.append(
            [
                figure,
                *(_shown(value) for value in values),
                *(_ratio(figure, values[0], v) for v in values[1:]),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = (
        "|"
        + "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths))
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:], *_warnings(names, results)])


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _ratio(figure: str, first: float | None, value: float | None) -> str:
    """As in "1.25 better"."""
    if not first or value is None:
        return "–"
    ratio = value / first
    if abs(ratio - 1) <= SAME:
        return f"{ratio:.2f}       "
    return f"{ratio:.2f} {'better' if (ratio > 1) == (figure in MORE_IS_BETTER) else ' worse'}"


def _mean_tokens(result: Mapping[str, Any], kind: str) -> float | None:
    """Per request that was completed."""
    total, completed = finite(result.get(f"total_{kind}_tokens")), finite(result.get("completed"))
    return total / completed if total is not None and completed else None


def _warnings(names: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes the comparison unfair."""
    lines = []
    for key in MUST_AGREE:
        values = [result.get(key) for result in results]
        if any(value != values[0] for value in values):
            lines.append(f"{key} differs: {', '.join(str(value) for value in values)}")
    lines += [
        f"{name}: was interrupted"
        for name, result in zip(names, results, strict=True)
        if result.get("interrupted")
    ]
    for kind in ("input", "output"):
        means = [_mean_tokens(result, kind) for result in results]
        known = [mean for mean in means if mean is not None]
        if known and max(known) - min(known) > SAME * max(known):
            lines.append(f"{kind} tokens per request differ: {', '.join(_shown(mean) for mean in means)}")
    for name, result in zip(names, results, strict=True):
        checks = result.get("checks")
        if isinstance(checks, dict) and finite(checks.get("failed")):
            lines.append(f"{name}: {checks['failed']} replies failed a check")
        if finite(result.get("failed")):
            lines.append(f"{name}: {result['failed']} requests failed")
    return ["", *lines] if lines else []
