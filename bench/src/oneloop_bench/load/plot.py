"""A picture of latency against load: one curve per run. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from oneloop_bench.load.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KINDS: Final = ("median", "p99")
SIZE_INCHES: Final = (5.0, 3.6)


def load_of(result: Mapping[str, Any]) -> tuple[str, float]:
    """(what the load is measured in, how much it was): the rate that was asked for, else the concurrency, else the
    throughput that came out."""
    rate = result.get("request_rate")
    if isinstance(rate, int | float) and math.isfinite(rate):
        return "request rate (req/s)", float(rate)
    if result.get("max_concurrency") is not None:
        return "concurrency", float(result["max_concurrency"])
    return "request throughput (req/s)", float(result["request_throughput"])


def curves(
    results: Sequence[Mapping[str, Any]], name: str
) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """(label of the x axis, label → points in order of load) of one figure, such as p99_ttft_ms.

    Results of one label are one curve. Loads of several kinds are all shown by the throughput that came out.
    """
    axes = {load_of(result)[0] for result in results}
    axis = axes.pop() if len(axes) == 1 else "request throughput (req/s)"
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        value = result.get(name)
        if value is not None:
            load = load_of(result)[1] if not axes else float(result["request_throughput"])
            found.setdefault(str(result.get("label") or result.get("model_id")), []).append((load, value))
    return axis, {label: sorted(points) for label, points in found.items()}


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: a panel per metric; median solid, p99 dashed. ValueError where matplotlib is missing, or there
    is nothing to draw."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'oneloop-bench[plot]'") from None
    shown = [
        metric
        for metric in METRICS
        if any(result.get(f"median_{metric}_ms") is not None for result in results)
    ]
    if not shown:
        raise ValueError("--plot: the results have no latencies to draw")
    figure = Figure(figsize=(SIZE_INCHES[0] * len(shown), SIZE_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for place, metric in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), place + 1)
        for kind, style in zip(KINDS, ("-", "--"), strict=True):
            axis, found = curves(results, f"{kind}_{metric}_ms")
            for number, (label, points) in enumerate(found.items()):
                loads, values = zip(*points, strict=True)
                axes.plot(
                    loads,
                    values,
                    style,
                    color=f"C{number % 10}",
                    marker="o",
                    markersize=3,
                    label=f"{label} {kind}",
                )
            axes.set_xlabel(axis)
        axes.set_ylabel(f"{metric.upper()} (ms)")
        axes.set_title(METRICS[metric])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
