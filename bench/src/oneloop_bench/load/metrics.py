"""The figures of a run, from its records. Names and meanings as users of `vllm bench serve` know them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from oneloop_bench.load.record import Record

METRICS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
}
"""Name → heading. In ms wherever they are told, in seconds before."""
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is told of the latencies, and what makes a request good."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Metric of GOODPUT_METRICS → ms at most."""

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"--percentile-metrics: {name} is none of {', '.join(METRICS)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ValueError(f"--metric-percentiles: {percentile:g} is not from 0 to 100")
        for name, limit in self.goodput.items():
            if name not in GOODPUT_METRICS or not limit >= 0:
                raise ValueError(
                    f"--goodput: {name}:{limit:g} is not one of {', '.join(GOODPUT_METRICS)} in ms"
                )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds, one per complete request; itl one per gap. NaN where a request has none (one token, no stream)."""

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    itl: NDArray[np.float64]
    e2el: NDArray[np.float64]
    client_queue_time: NDArray[np.float64]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Latencies:
        """TTFT to the first event with output, E2EL to the end; TPOT is what lies between the first event and the last,
        over the tokens after the first; ITL are the gaps between events (0 between those that came together)."""
        return cls(
            ttft=_array([r.times[0] - r.sent if r.times else np.nan for r in records]),
            tpot=_array([_tpot(r) for r in records]),
            itl=np.concatenate([_array([]), *(np.diff(r.times) for r in records if len(r.times) > 1)]),
            e2el=_array([r.end - r.sent for r in records]),
            client_queue_time=_array([r.sent - r.scheduled for r in records]),
        )

    def good(self, limits_ms: Mapping[str, float]) -> int:
        """How many requests keep every limit. What a request does not have (TPOT with one token) it keeps."""
        values: dict[str, NDArray[np.float64]] = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        keeps = np.ones(len(self.e2el), bool)
        for name, limit in limits_ms.items():
            keeps &= ~(values[name] * 1e3 > limit)
        return int(keeps.sum())


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.array(values, np.float64)


def _tpot(record: Record) -> float:
    if len(record.times) < 2 or record.output_len < 2:
        return float("nan")
    return (record.times[-1] - record.times[0]) / (record.output_len - 1)


def summarize(records: Sequence[Record], begin: float, selection: Selection) -> dict[str, Any]:
    """The figures. begin: when the run started (perf_counter)."""
    done = [record for record in records if record.is_complete]
    duration = max((record.end for record in records), default=begin) - begin
    latencies = Latencies.of(done)
    num_input, num_output = sum(r.input_len for r in done), sum(r.output_len for r in done)
    per_s = 1 / duration if duration > 0 else 0.0
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) * per_s,
        "request_goodput": latencies.good(selection.goodput) * per_s if selection.goodput else None,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
        "max_output_tokens_per_s": peak_rate(done, begin),
        "max_concurrent_requests": peak_concurrency(records),
        "total_cached_tokens": sum(r.cached_tokens or 0 for r in done),
        "output_events": sum(len(r.times) for r in done),
    }
    for name in selection.metrics:
        figures |= statistics(name, _named(latencies, name), selection.percentiles)
    return figures


def _named(latencies: Latencies, name: str) -> NDArray[np.float64]:
    match name:
        case "ttft":
            return latencies.ttft
        case "tpot":
            return latencies.tpot
        case "itl":
            return latencies.itl
        case "e2el":
            return latencies.e2el
        case _:
            return latencies.client_queue_time


def statistics(
    name: str, seconds: NDArray[np.float64], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """mean_, median_, std_, max_ and pNN_<name>_ms of the values that are numbers; None where there are none."""
    ms = seconds[~np.isnan(seconds)] * 1e3
    wanted = {f"p{percentile:g}": percentile for percentile in percentiles}
    if not len(ms):
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "max", *wanted)}
    found = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "max": ms.max()}
    found |= {kind: np.percentile(ms, percentile) for kind, percentile in wanted.items()}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def peak_rate(records: Sequence[Record], begin: float) -> float:
    """Tokens in the best second, seconds counted from the start. An event stands for its share of the tokens."""
    times = [_array(record.times) for record in records if record.times]
    if not times:
        return 0.0
    weights = [np.full(len(r.times), r.output_len / len(r.times)) for r in records if r.times]
    seconds = np.maximum(np.concatenate(times) - begin, 0.0).astype(np.int64)
    return float(np.bincount(seconds, np.concatenate(weights)).max())


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests that were under way at one time."""
    sent = [record for record in records if record.end > record.sent]
    if not sent:
        return 0
    times = np.concatenate([[r.sent for r in sent], [r.end for r in sent]])
    steps = np.concatenate([np.ones(len(sent), np.int64), -np.ones(len(sent), np.int64)])
    # Of an end and a beginning at the same time the end goes first.
    order = np.lexsort((steps, times))
    return int(np.cumsum(steps[order]).max())
