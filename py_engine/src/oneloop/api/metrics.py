"""Prometheus text. Names as dashboards for such servers know them, prefix `oneloop:`; all label sets are closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from oneloop.engine.histogram import Histogram
from oneloop.engine.loop_times import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from oneloop.engine.async_engine import AsyncEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "POST", "HEAD", "other")
STATUSES = ("2xx", "4xx", "5xx")
OTHER_ROUTE = "other"
CLIENT_GONE = 499
"""What a request counts as whose client left before the reply."""
_REQUEST_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_ENGINE_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of one sequence.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "Waiting for admission.",
    "request_prefill_time_seconds": "From admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Prompt tokens per request.",
    "request_generation_tokens": "Generated tokens per request, all its sequences together.",
    "request_params_n": "n per request.",
    "request_params_max_tokens": "max_tokens per request, where one was set.",
    "iteration_tokens_total": "Tokens per step.",
}


class HttpMetrics:
    """Requests by route, method and class of status. All series exist from the start, so their number never changes."""

    def __init__(self, routes: Iterable[str]) -> None:
        """routes: the paths of the route table; everything else counts as "other"."""
        self._counts = {
            (route, method, status): 0
            for route in (*routes, OTHER_ROUTE)
            for method in METHODS
            for status in STATUSES
        }
        self._durations = {route: Histogram(_REQUEST_S) for route in (*routes, OTHER_ROUTE)}

    def observe(self, route: str | None, method: str, status: int, duration_s: float) -> None:
        """Count one reply."""
        known = route if route in self._durations else OTHER_ROUTE
        assert known is not None
        status_class = "2xx" if status < 400 else "4xx" if status < 500 else "5xx"
        self._counts[known, method if method in METHODS else "other", status_class] += 1
        self._durations[known].observe(duration_s)

    def families(self) -> Iterator[Metric]:
        """Everything counted, as Prometheus families."""
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=["handler", "method", "status"]
        )
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds", "Time to the end of the reply.", labels=["handler"]
        )
        for route, histogram in self._durations.items():
            _add(durations, [route], histogram)
        yield durations


class _Snapshot(Collector):
    """Families that were read on the event loop, to be written out in a thread."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def exposition(engine: AsyncEngine | None, http: HttpMetrics) -> bytes:
    """The text of /metrics. Numbers are read on the loop in one go; formatting and /proc are a thread's work.

    engine: None where there is no model.
    """
    families = [*(() if engine is None else _engine_families(engine)), *http.families()]
    return await asyncio.to_thread(_render, families)


def _render(families: list[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(families))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return generate_latest(registry)


def _engine_families(engine: AsyncEngine) -> Iterator[Metric]:
    labels = {"model_name": engine.served_model_names[0], "engine": "0"}
    names, values = list(labels), list(labels.values())
    for name, (text, value) in _gauges(engine).items():
        gauge = GaugeMetricFamily(f"oneloop:{name}", text, labels=names)
        gauge.add_metric(values, value)
        yield gauge
    for name, (text, value) in _counters(engine).items():
        counter = CounterMetricFamily(f"oneloop:{name}", text, labels=names)
        counter.add_metric(values, value)
        yield counter
    yield from _labelled_counters(engine, labels)
    for name, text in _ENGINE_HISTOGRAMS.items():
        family = HistogramMetricFamily(f"oneloop:{name}", text, labels=names)
        _add(family, values, _engine_histogram(engine, name))
        yield family
    yield from _grammar_families(engine, labels)
    yield from _loop_families(engine, labels)
    info = InfoMetricFamily("oneloop:cache_config", "Settings of the KV cache.", labels=names)
    cache = engine.config.cache
    info.add_metric(
        values,
        {
            "block_size": str(engine.model_info.block_size),
            "num_gpu_blocks": str(engine.model_info.num_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
        },
    )
    yield info


def _grammar_families(engine: AsyncEngine, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Grammars of structured output: found, made, refused; those that are kept."""
    names, values, metrics = list(labels), list(labels.values()), engine.grammars.metrics
    requests = CounterMetricFamily(
        "oneloop:grammar_requests",
        "Grammars asked for. hit: kept from before; miss: to be compiled; joined: the same was being compiled; "
        "refused: of the misses, what was no grammar; failed: of these, what was not compiled for another reason; "
        "busy: what there was no room to compile.",
        labels=[*names, "result"],
    )
    for result, count in metrics.requests.items():
        requests.add_metric([*values, result], count)
    yield requests
    seconds = HistogramMetricFamily(
        "oneloop:grammar_compile_seconds", "Compiling a grammar, refused ones too.", labels=names
    )
    _add(seconds, values, metrics.compile_seconds)
    yield seconds
    kept = GaugeMetricFamily("oneloop:grammars_kept", "Compiled grammars that are kept.", labels=names)
    kept.add_metric(values, metrics.num_entries)
    yield kept


def _loop_families(engine: AsyncEngine, labels: Mapping[str, str]) -> Iterator[Metric]:
    """The event loop: its seconds by part, its turns, the collector's pauses."""
    names, values, times = list(labels), list(labels.values()), engine.metrics.loop
    parts = CounterMetricFamily(
        "oneloop:event_loop_part_seconds",
        "Seconds of the event loop by part: " + "; ".join(f"{part}: {text}" for part, text in PARTS.items()),
        labels=[*names, "part"],
    )
    for part, seconds in times.parts.items():
        parts.add_metric([*values, part], seconds)
    yield parts
    turns = HistogramMetricFamily(
        "oneloop:event_loop_turn_seconds",
        "A turn of the event loop: how late it may see what happened meanwhile.",
        labels=names,
    )
    _add(turns, values, times.turns)
    yield turns
    pauses = HistogramMetricFamily(
        "oneloop:gc_pause_seconds", "A garbage collection, in which no Python runs.", labels=names
    )
    _add(pauses, values, times.gc_pauses)
    yield pauses
    longest = GaugeMetricFamily("oneloop:gc_pause_longest_seconds", "The longest of them.", labels=names)
    longest.add_metric(values, times.gc_longest_s)
    yield longest


def _gauges(engine: AsyncEngine) -> Mapping[str, tuple[str, float]]:
    stats = engine.stats()
    used = stats.num_used_blocks / max(stats.num_total_blocks, 1)
    return {
        "num_requests_running": ("Sequences in the batch.", stats.num_running),
        "num_requests_waiting": ("Sequences waiting for admission.", stats.num_waiting),
        "kv_cache_usage_perc": ("Share of KV blocks in use (1 = all).", used),
        "kv_blocks_free": ("KV blocks without content.", stats.num_free_blocks),
        "kv_blocks_cached": ("Unreferenced KV blocks that can be found again.", stats.num_cached_blocks),
        "kv_blocks_used": ("Referenced KV blocks.", stats.num_used_blocks),
        "engine_healthy": ("1 while requests are served.", float(engine.health().ok)),
    }


def _counters(engine: AsyncEngine) -> Mapping[str, tuple[str, float]]:
    stats = engine.stats()
    return {
        "prompt_tokens": ("Prompt tokens, cached ones included.", stats.num_prompt_tokens),
        "generation_tokens": ("Generated tokens.", stats.num_generation_tokens),
        "prompt_tokens_cached": ("Prompt tokens from the prefix cache.", stats.num_prefix_hit_tokens),
        "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.num_prefix_query_tokens),
        "prefix_cache_hits": ("Tokens found in the prefix cache.", stats.num_prefix_hit_tokens),
        "steps": ("Steps that were scheduled.", stats.num_steps),
        "num_preemptions": ("Sequences that gave up their blocks.", stats.num_preemptions),
    }


def _labelled_counters(engine: AsyncEngine, labels: Mapping[str, str]) -> Iterator[Metric]:
    finished = CounterMetricFamily(
        "oneloop:request_success", "Ended requests by reason.", labels=[*labels, "finished_reason"]
    )
    for reason, count in engine.metrics.request_success.items():
        finished.add_metric([*labels.values(), reason], count)
    yield finished
    rejected = CounterMetricFamily(
        "oneloop:admission_rejections",
        "Requests refused before they were queued.",
        labels=[*labels, "reason"],
    )
    for cause, count in engine.metrics.rejected.items():
        rejected.add_metric([*labels.values(), cause], count)
    yield rejected


def _engine_histogram(engine: AsyncEngine, name: str) -> Histogram:
    """The engine's histogram behind a metric name."""
    metrics = engine.metrics
    return {
        "time_to_first_token_seconds": metrics.time_to_first_token_seconds,
        "inter_token_latency_seconds": metrics.inter_token_latency_seconds,
        "e2e_request_latency_seconds": metrics.e2e_request_latency_seconds,
        "request_queue_time_seconds": metrics.request_queue_time_seconds,
        "request_prefill_time_seconds": metrics.request_prefill_time_seconds,
        "request_decode_time_seconds": metrics.request_decode_time_seconds,
        "request_prompt_tokens": metrics.request_prompt_tokens,
        "request_generation_tokens": metrics.request_generation_tokens,
        "request_params_n": metrics.request_params_n,
        "request_params_max_tokens": metrics.request_params_max_tokens,
        "iteration_tokens_total": metrics.iteration_tokens,
    }[name]


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets = [
        ("+Inf" if bound == float("inf") else str(bound), count) for bound, count in histogram.cumulative()
    ]
    family.add_metric(labels, buckets, histogram.total)
