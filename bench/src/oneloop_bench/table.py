"""The table of bench/README.md, made from bench/results/h200.json."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: a figure, or several of one kind separated by slashes."""

    name: str
    peer: tuple[float | None, ...]
    """vLLM 0.26 on the same card, the better of its two front ends; None where it was not measured."""
    target: tuple[float, ...]
    limit: tuple[float, ...]
    """By the card's measured rates; empty where none was worked out."""
    read: Callable[[Mapping[str, Any]], Sequence[float | None]]
    digits: int
    more_is_better: tuple[bool, ...] = ()
    """Per value; empty: less is better for all."""


def _get(results: Mapping[str, Any], *path: str | int) -> Any:
    """What lies at the path, or None."""
    found: Any = results
    for key in path:
        if isinstance(found, dict):
            found = found.get(str(key))
        elif isinstance(found, list) and isinstance(key, int) and key < len(found):
            found = found[key]
        else:
            return None
    return found


def _steps(
    model: str, workload: str, batches: Sequence[int]
) -> Callable[[Mapping[str, Any]], list[float | None]]:
    """Mean over the repetitions of the decode step with cached prompts, per batch size."""

    def read(results: Mapping[str, Any]) -> list[float | None]:
        rows = _get(results, "offline", model, workload)
        rows = rows if isinstance(rows, list) else []
        found = [[row["cached_step_ms"] for row in rows if row["bs"] == batch] for batch in batches]
        return [mean(times) if times else None for times in found]

    return read


def _paths(*paths: tuple[str | int, ...]) -> Callable[[Mapping[str, Any]], list[float | None]]:
    return lambda results: [_get(results, *path) for path in paths]


_STEP_8B, _STEP_06B = (1, 8, 32, 128, 256), (1, 8, 64, 256, 512)
_PREFIX = ("offline", "llama8b", "prefix_256x4096shared_128own_64out")
_RATE, _AT_ONCE, _SMALL = (
    ("online", "llama8b_rate16"),
    ("online", "llama8b_conc256"),
    ("online", "qwen06b_conc512"),
)

FIGURES = (
    Figure("llama8b decode step, ms, batch 1 / 8 / 32 / 128 / 256", (4.99, 5.25, 6.05, 9.35, 16.4),
           (4.3, 4.5, 5.3, 8.8, 14.9), (3.5, 3.7, 4.5, 7.7, 13.3), _steps("llama8b", "step_1024in", _STEP_8B), 2),
    Figure("qwen06b decode step, ms, batch 1 / 8 / 64 / 256 / 512", (2.18, 2.36, 2.64, 7.4, 13.4),
           (0.80, 0.95, 1.8, 5.2, 10.2), (0.30, 0.40, 1.26, 4.3, 8.6), _steps("qwen06b", "step_512in", _STEP_06B), 2),
    Figure("llama8b 1000 × 1024/128, s", (34.7,), (32.0,), (29,),
           _paths(("offline", "llama8b", "batch_1000x1024in_128out", "seconds")), 1),
    Figure("llama8b 512 × 128/1024, s", (28.6,), (25.0,), (21,),
           _paths(("offline", "llama8b", "batch_512x128in_1024out", "seconds")), 1),
    Figure("llama8b shared prefix, cold / warm, s", (3.33, 3.19), (2.6, 2.4), (),
           _paths((*_PREFIX, 0, "seconds"), (*_PREFIX, 1, "seconds")), 2),
    Figure("qwen06b 2000 × 128/256, s", (22.3,), (7.5,), (4.5,),
           _paths(("offline", "qwen06b", "batch_2000x128in_256out", "seconds")), 1),
    Figure("online llama8b 16 req/s: TTFT p50 / p99, TPOT p50, ITL p99, ms", (50, 94, 8.0, 36), (38, 75, 7.0, 25), (),
           _paths((*_RATE, "ttft_ms", "p50"), (*_RATE, "ttft_ms", "p99"), (*_RATE, "tpot_ms", "p50"),
                  (*_RATE, "itl_ms", "p99")), 1),
    Figure("online llama8b 256 at once: tok/s, TTFT p50 in ms", (9774, 579), (11500, 450), (),
           _paths((*_AT_ONCE, "out_tok_s"), (*_AT_ONCE, "ttft_ms", "p50")), 0, (True, False)),
    Figure("online qwen06b 512 at once: tok/s, TTFT p99, ITL p99 in ms", (31950, 462, 51), (64000, 300, 20), (110000,),
           _paths((*_SMALL, "out_tok_s"), (*_SMALL, "ttft_ms", "p99"), (*_SMALL, "itl_ms", "p99")), 0,
           (True, False, False)),
    Figure("start to ready, llama8b server, s, kernel cache cold / warm", (89, None), (30, 12), (),
           _paths(("start", "llama8b", "cold_s"), ("start", "llama8b", "warm_s")), 1),
)  # fmt: skip


def markdown(results: Mapping[str, Any]) -> str:
    """The table; figures that were not measured are dashes."""
    lines = ["| figure | vLLM 0.26 | oneloop | to reach | reached | limit |", "|---|---|---|---|---|---|"]
    for figure in FIGURES:
        values = list(figure.read(results))
        cells = [
            figure.name,
            _cell(figure.peer, figure.digits),
            _cell(values, figure.digits),
            _cell(figure.target, figure.digits),
            _reached(figure, values),
            _cell(figure.limit, figure.digits),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float | None], digits: int) -> str:
    """Numbers with slashes; large ones with thousands separators."""
    if not any(value is not None for value in values):
        return "–"

    def text(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,.{0 if value >= 1000 else digits}f}"

    return " / ".join(text(value) for value in values)


def _reached(figure: Figure, values: Sequence[float | None]) -> str:
    """Per value a tick, or how far it is from the target."""
    ups = figure.more_is_better or (False,) * len(values)
    marks = []
    for value, target, up in zip(values, figure.target, ups, strict=True):
        if value is None:
            marks.append("–")
        elif value >= target if up else value <= target:
            marks.append("✓")
        else:
            marks.append(f"{value / target - 1:+.0%}")
    return "–" if set(marks) == {"–"} else " / ".join(marks)
