"""The table of bench/README.md, made from bench/results/h200.json."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NOT_MEASURED: Final = "Not measured yet."


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: a figure, or several of one kind separated by slashes."""

    name: str
    peer: tuple[float | None, ...]
    """vLLM 0.26 on the same card, the better of its two front ends; None where it was not measured."""
    target: tuple[float | None, ...]
    """None where nothing was set."""
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


def _prefill(model: str, workload: str) -> Callable[[Mapping[str, Any]], list[float | None]]:
    """Tokens per second of prompts handed over at once: of the batch size that gives most, its mean."""

    def read(results: Mapping[str, Any]) -> list[float | None]:
        rows = _get(results, "offline", model, workload)
        rates: dict[int, list[float]] = {}
        for row in rows if isinstance(rows, list) else []:
            rates.setdefault(row["bs"], []).append(row["prefill_tok_s"])
        return [max((mean(found) for found in rates.values()), default=None)]

    return read


def _joined(
    *reads: Callable[[Mapping[str, Any]], Sequence[float | None]],
) -> Callable[[Mapping[str, Any]], list[float | None]]:
    return lambda results: [value for read in reads for value in read(results)]


def _mode_speed(model: str, batches: Sequence[int]) -> Callable[[Mapping[str, Any]], list[float | None]]:
    """Of the deterministic mode's decode steps, as a part of the default's speed."""

    def read(results: Mapping[str, Any]) -> list[float | None]:
        rows = _get(results, "determinism", model, "results") or []
        speeds = {row["batch"]: row["speed"] for row in rows if "batch" in row}
        return [speeds.get(batch) for batch in batches]

    return read


_STEP_8B, _STEP_06B, _STEP_30B = (1, 8, 32, 128, 256), (1, 8, 64, 256, 512), (1, 32, 128)
_BATCH_30B = "batch_512x512in_256out"
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
    Figure("prefill, tok/s, llama8b / qwen06b / qwen30ba3b", (42_700, 353_000, 72_000), (None, None, None), (),
           _joined(_prefill("llama8b", "step_1024in"), _prefill("qwen06b", "step_512in"),
                   _prefill("qwen30ba3b", "step_512in")), 0, (True, True, True)),
    Figure("qwen30ba3b decode step, ms, batch 1 / 32 / 128", (4.13, 16.0, 19.7), (2.3, 14.5, 18.0), (1.43, 12.8, 15.7),
           _steps("qwen30ba3b", "step_512in", _STEP_30B), 2),
    Figure("qwen30ba3b 512 × 512/256, s, in steps of up to 2,048 / 8,192 tokens", (11.6, 11.6), (9.8, 9.8), (),
           _paths(("offline", "qwen30ba3b", _BATCH_30B, "seconds"),
                  ("offline", "qwen30ba3b+steps8k", _BATCH_30B, "seconds")), 1),
    Figure("llama8b FP8 (weights, KV) decode step, ms, batch 1 / 256; prefill, tok/s", (None, None, None),
           (2.8, 9.5, 62_000), (1.8, 7.0), _joined(_steps("llama8b+fp8", "step_1024in", (1, 256)),
                                                   _prefill("llama8b+fp8", "step_1024in")), 2, (False, False, True)),
    Figure("llama8b W4A16 decode step, ms, batch 1 / 16", (None, None), (1.9, 2.6), (1.1,),
           _steps("llama8b+w4a16", "step_1024in", (1, 16)), 2),
    Figure("deterministic mode: speed of the default's, llama8b decode, batch 1 / 32 / 256", (None, None, None),
           (0.9, 0.9, 0.9), (), _mode_speed("llama8b", (1, 32, 256)), 3, (True, True, True)),
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
        if value is None or target is None:
            marks.append("–")
        elif value >= target if up else value <= target:
            marks.append("✓")
        else:
            marks.append(f"{value / target - 1:+{'.1%' if abs(value / target - 1) < 0.01 else '.0%'}}")
    return "–" if set(marks) == {"–"} else " / ".join(marks)


def determinism(results: Mapping[str, Any]) -> str:
    """What the deterministic mode costs, and how far answers agree between batch sizes in either mode."""
    head = "| model, step | default, ms | deterministic, ms | speed of the default's |"
    costs = [head, "|---|---|---|---|"]
    agreements = [
        "| model, batch | mode | answers as they are alone | tokens before the others part |",
        costs[1],
    ]
    for model, found in (_get(results, "determinism") or {}).items():
        for row in found["results"]:
            step = (
                f"decode, batch {row['batch']}" if "batch" in row else f"prefill, {row['prefill']:,} tokens"
            )
            times = f"{row['default_ms']:.2f} | {row['deterministic_ms']:.2f} | {row['speed']:.1%}"
            costs.append(f"| {model}, {step} | {times} |")
    for model, found in (_get(results, "agreement") or {}).items():
        for row in sorted(found["results"], key=lambda row: row["batch"]):
            equal = f"{row['equal']:.1%} of {row['answers']}"
            parted = "–" if row["same_tokens"] is None else f"{row['same_tokens']:.1f}"
            agreements.append(f"| {model}, {row['batch']} | {row['mode']} | {equal} | {parted} |")
    tables = ["\n".join(lines) for lines in (costs, agreements) if len(lines) > 2]
    return "\n\n".join(tables) or NOT_MEASURED
