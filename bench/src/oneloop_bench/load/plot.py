"""A picture of latency against load: one curve per run. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from oneloop_bench.load.metrics import METRICS
from oneloop_bench.load.result import finite, make_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KINDS: Final = ("median", "p99")
SIZE_INCHES: Final = (5.0, 3.6)


THROUGHPUT: Final = "request throughput (req/s)"


def load_of(result: Mapping[str, Any]) -> tuple[str, float]:
    """(what the load is measured in, how much it was): the rate that was asked for, else the concurrency, else the
    throughput that came out."""
    if (rate := finite(result.get("request_rate"))) is not None:
        return "request rate (req/s)", rate
    if (concurrency := finite(result.get("max_concurrency"))) is not None:
        return "concurrency", concurrency
    return THROUGHPUT, finite(result.get("request_throughput")) or 0.0


def curves(
    results: Sequence[Mapping[str, Any]], name: str
) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """(label of the x axis, label → points in order of load) of one figure, such as p99_ttft_ms.

    Results of one label are one curve. Loads of several kinds are all shown by the throughput that came out.
    """
    axes = {load_of(result)[0] for result in results}
    axis = axes.pop() if len(axes) == 1 else THROUGHPUT
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        value = finite(result.get(name))
        if value is not None:
            load = load_of(result)[1] if not axes else finite(result.get("request_throughput")) or 0.0
            found.setdefault(str(result.get("label") or result.get("model_id")), []).append((load, value))
    return axis, {label: sorted(points) for label, points in found.items()}


def check(path: Path) -> None:
    """Before a run, so that no picture is missing after it. ValueError without matplotlib, and for a kind of file that
    it does not draw; OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'oneloop-bench[plot]'") from None
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(
            f"--plot: {path} ends with none of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
        )
    make_folder(path)


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture: a panel per metric; median solid, p99 dashed. ValueError where matplotlib is missing, or there
    is nothing to draw."""
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [
        metric
        for metric in METRICS
        if any(finite(result.get(f"median_{metric}_ms")) is not None for result in results)
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
    figure.savefig(path, dpi=120)
