"""/metrics tells the truth (B-23 in small), under names that dashboards know, with a fixed number of series."""
# ruff: noqa: E501  (tables)

from __future__ import annotations

import asyncio
import random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
    "prompt_tokens_cached_total", "num_preemptions_total", "request_success_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "admission_rejections_total", "cache_config_info", "steps_total",
    "event_loop_part_seconds_total", "gc_pause_longest_seconds",
    *(f"{name}_{part}" for part in ("bucket", "sum", "count") for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens",
        "iteration_tokens_total", "event_loop_turn_seconds", "gc_pause_seconds")),
}  # fmt: skip


async def samples(server: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, text = await server.get("/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return sum(
        value for (n, have), value in found.items() if n == name and labels.items() <= dict(have).items()
    )


async def test_names_and_labels(server: Any) -> None:
    found = await samples(server)
    ours = {name.removeprefix("oneloop:") for name, _ in found if name.startswith("oneloop:")}
    assert ours >= NAMES
    assert all(
        {"model_name", "engine"} <= dict(labels).keys()
        for name, labels in found
        if name.startswith("oneloop:")
    )
    assert any(name.startswith("process_") for name, _ in found)
    assert any(name.startswith("python_gc_") for name, _ in found)
    assert any(name == "http_requests_total" for name, _ in found)
    async with server.session.get(server.url + "/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_counters_tell_the_truth(server: Any) -> None:
    source, usage = random.Random(2), {"prompt": 0, "completion": 0}
    outcomes = {"stop": 0, "length": 0}
    statuses = {200: 0, 400: 0, 404: 0}

    async def one() -> None:
        kind = source.random()
        body: dict[str, Any] = {
            "prompt": "x" * source.randint(1, 30),
            "max_tokens": source.choice([3, 200]),
            "n": 1,
        }
        if kind < 0.1:
            body["n"] = 0
        elif kind < 0.2:
            body["model"] = "nope"
        status, answer = await server.post(COMPLETIONS, body)
        statuses[status] += 1
        if status == 200:
            usage["prompt"] += answer["usage"]["prompt_tokens"]
            usage["completion"] += answer["usage"]["completion_tokens"]
            outcomes[answer["choices"][0]["finish_reason"]] += 1

    before = await samples(server)
    for _ in range(10):
        await asyncio.gather(*[one() for _ in range(30)])
    found = await samples(server)
    assert found.keys() == before.keys(), "the number of series never changes"
    for reason, count in outcomes.items():
        assert total(found, "oneloop:request_success_total", finished_reason=reason) == count
    assert total(found, "oneloop:prompt_tokens_total") == usage["prompt"]
    assert total(found, "oneloop:generation_tokens_total") == usage["completion"]
    finished = sum(outcomes.values())
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_prompt_tokens"):
        assert total(found, f"oneloop:{name}_count") == finished == statuses[200]
    assert total(found, "oneloop:request_generation_tokens_sum") == usage["completion"]
    assert total(found, "oneloop:inter_token_latency_seconds_count") == usage["completion"] - finished
    posts = {"handler": COMPLETIONS, "method": "POST"}
    assert total(found, "http_requests_total", status="2xx", **posts) == statuses[200]
    assert total(found, "http_requests_total", status="4xx", **posts) == statuses[400] + statuses[404]
    assert total(found, "http_request_duration_seconds_count", handler=COMPLETIONS) == sum(statuses.values())
    assert total(found, "oneloop:num_requests_running") == 0


async def test_strange_requests_make_no_series(server: Any) -> None:
    """T13: method and path labels come from a fixed list."""
    before = await samples(server)
    for number in range(100):
        method = f"M{number}".encode()
        await server.raw(b"%b /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % (method, method))
        await server.get(f"/path{number}")
    after = await samples(server)
    assert after.keys() == before.keys()
    assert total(after, "http_requests_total", handler="other", method="GET", status="4xx") >= 100


async def test_gauges_follow(server: Any) -> None:
    server.engine.paused.clear()
    running = [asyncio.create_task(server.post(COMPLETIONS, {"prompt": "a"})) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert total(await samples(server), "oneloop:num_requests_running") == 5
    server.engine.paused.set()
    await asyncio.gather(*running)
    assert total(await samples(server), "oneloop:num_requests_running") == 0
