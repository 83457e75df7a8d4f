"""Figures against numpy; names of fields against those that tools for `vllm bench serve` read."""

import json
from array import array

import numpy as np
import pytest

from oneloop_bench.load import compare, plot, result
from oneloop_bench.load.metrics import Latencies, Selection, peak_concurrency, peak_rate, summarize
from oneloop_bench.load.processes import Outcome
from oneloop_bench.load.record import Record

BEGIN = 1000.0


def record(index, sent, gaps, *, end=0.0, tokens=None, **more):
    """A reply whose events come after these gaps, the first after the first gap."""
    times = array("d", BEGIN + sent + np.cumsum(gaps)) if len(gaps) else array("d")
    ends = (times[-1] if times else BEGIN + sent) + end
    done = {"prompt_tokens": 10, "completion_tokens": len(gaps) if tokens is None else tokens, "status": 200}
    return Record(index, BEGIN + sent - 0.25, sent=BEGIN + sent, end=ends, times=times, **{**done, **more})


def drawn(count=200, seed=0):
    rng = np.random.default_rng(seed)
    return [
        record(place, rng.random() * 3, rng.exponential(0.05, rng.integers(2, 40)), end=0.01)
        for place in range(count)
    ]


def test_latencies_are_what_they_are_called():
    records = [record(0, 1.0, [0.5, 0.1, 0.3], end=0.05), record(1, 2.0, [0.2], end=0.0), record(2, 0.0, [])]
    latencies = Latencies.of(records)
    np.testing.assert_allclose(latencies.ttft, [0.5, 0.2, np.nan])
    np.testing.assert_allclose(latencies.itl, [0.1, 0.3])
    np.testing.assert_allclose(latencies.tpot, [0.2, np.nan, np.nan])
    np.testing.assert_allclose(latencies.e2el, [0.95, 0.2, 0.0])
    np.testing.assert_allclose(latencies.client_queue_time, [0.25] * 3)


def test_tpot_counts_tokens_not_events():
    """Three events with seven tokens."""
    (tpot,) = Latencies.of([record(0, 0.0, [0.5, 0.1, 0.2], tokens=7)]).tpot
    assert tpot == pytest.approx(0.3 / 6)


def test_statistics_are_numpys():
    records = drawn()
    percentiles = (1.0, 50.0, 90.0, 99.0, 99.9)
    found = summarize(
        records, BEGIN, Selection(("ttft", "tpot", "itl", "e2el", "client_queue_time"), percentiles)
    )
    ttft = np.array([r.times[0] - r.sent for r in records]) * 1e3
    itl = np.concatenate([np.diff(r.times) for r in records]) * 1e3
    e2el = np.array([r.end - r.sent for r in records]) * 1e3
    tpot = np.array([(r.times[-1] - r.times[0]) / (len(r.times) - 1) for r in records]) * 1e3
    for name, values in (("ttft", ttft), ("itl", itl), ("e2el", e2el), ("tpot", tpot)):
        assert found[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(values.std())
        assert found[f"max_{name}_ms"] == pytest.approx(values.max())
        for percentile in percentiles:
            assert found[f"p{percentile:g}_{name}_ms"] == pytest.approx(np.percentile(values, percentile))
    assert found["median_client_queue_time_ms"] == pytest.approx(250.0)


def test_throughputs():
    records = [
        record(0, 0.0, [1.0, 1.0], tokens=30, cached_tokens=4),
        record(1, 1.0, [1.0, 2.0], tokens=10),
        record(2, 1.0, [], error="cut"),
    ]
    found = summarize(records, BEGIN, Selection())
    assert found["duration"] == pytest.approx(4.0)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 40)
    assert found["total_cached_tokens"] == 4
    assert found["request_throughput"] == pytest.approx(0.5)
    assert found["output_throughput"] == pytest.approx(10.0)
    assert found["total_token_throughput"] == pytest.approx(15.0)
    assert found["max_output_tokens_per_s"] == pytest.approx(20.0), "15 of the first and 5 of the second"
    assert found["request_goodput"] is None


def test_without_usage_events_are_counted():
    found = summarize(
        [record(0, 0.0, [0.1] * 5, prompt_tokens=None, completion_tokens=None, expected_len=12)],
        BEGIN,
        Selection(),
    )
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 5)


def test_goodput():
    records = [
        record(0, 0.0, [0.1, 0.1]),
        record(1, 0.0, [0.5, 0.1]),
        record(2, 0.0, [0.1, 0.9]),
        record(3, 0.0, [0.1]),
    ]
    for limits, count in (
        ({"ttft": 200.0}, 3),
        ({"ttft": 200.0, "tpot": 300.0}, 2),
        ({"e2el": 150.0}, 1),
        ({}, None),
    ):
        found = summarize(records, BEGIN, Selection(goodput=limits))
        expected = None if count is None else pytest.approx(count / found["duration"])
        assert found["request_goodput"] == expected, limits


def test_peaks():
    records = [record(0, 0.0, [1.0]), record(1, 0.5, [1.0]), record(2, 1.0, [1.0]), record(3, 5.0, [1.0])]
    assert peak_concurrency(records) == 2, "who begins when another ends was not beside it"
    assert peak_concurrency([]) == 0
    assert peak_concurrency([record(0, 0.0, [])]) == 0, "what was never sent was not under way"
    assert peak_rate(records, BEGIN) == 2.0
    assert peak_rate([], BEGIN) == 0.0


@pytest.mark.parametrize(
    ("client", "duration", "said"),
    [
        ({}, 9.0, ""),
        ({"cpu_share": [0.3, 0.85]}, 9.0, "busy for 85%"),
        ({"cpu_share": [0.85]}, 0.4, ""),
        ({"p99_send_delay_ms": 25.0}, 9.0, "up to 25 ms late"),
        ({"p99_send_delay_ms": None}, 9.0, ""),
    ],
)
def test_what_is_said_of_the_client(client, duration, said):
    remarks = result._remarks(
        {
            "checks": {"failed": 0, "checked": 0, "problems": {}},
            "client": {"processes": 1, "cpu_share": [0.7], "p99_send_delay_ms": 15.0, **client},
            "error_messages": {},
            "duration": duration,
        }
    )
    assert len(remarks) == bool(said)
    assert said in "".join(remarks)


def test_nothing_came():
    found = summarize([record(0, 0.0, [], error="cut")], BEGIN, Selection())
    assert found["mean_ttft_ms"] is None
    assert found["request_throughput"] == 0
    assert summarize([], BEGIN, Selection())["duration"] == 0


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"metrics": ("ttft", "itl2")}, "--percentile-metrics"),
        ({"percentiles": (101.0,)}, "--metric-percentiles"),
        ({"goodput": {"itl": 5.0}}, "--goodput"),
        ({"goodput": {"ttft": -5.0}}, "--goodput"),
    ],
)
def test_selections_that_cannot_be(arguments, option):
    with pytest.raises(ValueError, match=option):
        Selection(**arguments)


ABOUT = {
    "date": "20261130-080000", "backend": "openai", "label": "ours", "model_id": "org/model", "request_rate": 4.0,
    "max_concurrency": None, "num_prompts": 200, "dataset_name": "random",
}  # fmt: skip


def made(records=None, cpu_s=(0.1,), **about):
    outcome = Outcome(drawn() if records is None else records, BEGIN, list(cpu_s))
    return result.make_result({**ABOUT, **about}, outcome, Selection(), detailed=False)


def test_fields_as_readers_of_vllms_results_know_them():
    outcome = Outcome(drawn(), BEGIN, [0.1])
    found = result.make_result(ABOUT, outcome, Selection(goodput={"ttft": 1.0}), detailed=True)
    known = {
        "date", "backend", "label", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration",
        "completed",
        "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors",
    }  # fmt: skip
    known |= {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert known <= found.keys()
    assert json.loads(json.dumps(found)) == found
    assert len(found["ttfts"]) == len(found["itls"]) == 200
    assert {"ttfts", "errors"}.isdisjoint(made())


def test_a_result_is_read_back(tmp_path):
    found = made()
    result.save(found, tmp_path / "a/b.json")
    assert result.load(tmp_path / "a/b.json") == [found]
    for _ in range(2):
        result.save(found, tmp_path / "lines.json", append=True)
    assert result.load(tmp_path / "lines.json") == [found, found]
    (tmp_path / "bad.json").write_text("{\n[")
    with pytest.raises(ValueError, match="is no result"):
        result.load(tmp_path / "bad.json")


def test_names_of_files():
    assert result.file_name(ABOUT) == "ours-4.0qps-model-20261130-080000.json"
    assert result.file_name({**ABOUT, "request_rate": "inf", "max_concurrency": 8}).startswith(
        "ours-infqps-concurrency8-"
    )
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 9.0}
    assert result.file_name({**ABOUT, **ramp}).startswith("ours-ramp-up-linear-1qps-9qps-model")


def test_what_a_person_reads():
    records = drawn()
    records[3].problems = ["usage", "done"]
    records[4].error = "status 500: broken"
    text = result.text(made(records, cpu_s=(0.1, 99.0)))
    assert "Median TTFT (ms):" in text
    assert "1 of 199 replies failed a check: usage 1, done 1" in text
    assert "1 request failed: status 500: broken" in text
    assert "Use more than 2 --client-processes" in text
    assert "All checks held on 200 replies." in result.text(made())
    whole = result.text(made([record(0, 0.0, [])]))
    assert "TTFT" not in whole, "whole replies have no first token"
    assert "E2EL" in whole


def test_how_late_the_client_was():
    assert made()["client"]["p99_send_delay_ms"] == pytest.approx(250.0)
    assert made(max_concurrency=8)["client"]["p99_send_delay_ms"] is None


def test_compare():
    first = made()
    second = {
        **first,
        "output_throughput": first["output_throughput"] * 1.25,
        "p99_itl_ms": first["p99_itl_ms"] * 1.5,
    }
    lines = compare.table(["a", "b"], [first, second]).splitlines()

    def row(name):
        return next(line for line in lines if line.startswith(f"| {name} "))

    assert "b / a" in lines[0]
    assert row("output_throughput").split("|")[-2].strip() == "1.25 better"
    assert row("p99_itl_ms").split("|")[-2].strip() == "1.50  worse"
    assert row("mean_ttft_ms").split("|")[-2].strip() == "1.00"
    assert len({len(line) for line in lines}) == 1


def test_compare_says_what_is_unfair():
    second = made(request_rate=8.0, num_prompts=100)
    second["checks"]["failed"] = 3
    text = compare.table(["a", "b"], [made(), second])
    assert "request_rate differs: 4.0, 8.0" in text
    assert "num_prompts differs: 200, 100" in text
    assert "b: 3 replies failed a check" in text


def test_compare_with_a_result_of_vllm():
    """It has none of our own fields, and other percentiles."""
    theirs = {
        "completed": 200,
        "output_throughput": 100.0,
        "p99_ttft_ms": 5.0,
        "mean_ttft_ms": 2.0,
        "request_rate": 4.0,
    }
    text = compare.table(["ours", "theirs"], [made(), theirs])
    assert "p99_ttft_ms" in text
    assert "–" in text


def test_curves():
    results = [
        made(request_rate=rate, label=label, max_concurrency=None)
        for label in ("a", "b")
        for rate in (4.0, 1.0, 2.0)
    ]
    axis, found = plot.curves(results, "p99_ttft_ms")
    assert axis == "request rate (req/s)"
    assert {label: [load for load, _ in points] for label, points in found.items()} == {
        "a": [1.0, 2.0, 4.0],
        "b": [1.0, 2.0, 4.0],
    }
    axis, _ = plot.curves(
        [made(request_rate="inf", max_concurrency=number) for number in (1, 8)], "p99_ttft_ms"
    )
    assert axis == "concurrency"
    axis, found = plot.curves([made(), made(request_rate="inf", max_concurrency=8)], "p99_ttft_ms")
    assert axis == "request throughput (req/s)"
    assert len(found["ours"]) == 2


def test_a_picture(tmp_path):
    plot.draw([made(request_rate=rate) for rate in (1.0, 2.0)], tmp_path / "deep/picture.png")
    data = (tmp_path / "deep/picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    with pytest.raises(ValueError, match="no latencies"):
        plot.draw([made([])], tmp_path / "none.png")


def test_files_of_others_may_hold_anything(tmp_path):
    path = tmp_path / "theirs.json"
    path.write_text('{"request_throughput": NaN, "median_ttft_ms": Infinity, "checks": 5, "failed": "x"}')
    (theirs,) = result.load(path)
    assert "theirs" in compare.table(["theirs", "ours"], [theirs, made()])
    assert "–" in compare.table(["theirs", "ours"], [{"duration": 10**400}, made()])
    odd = {"median_ttft_ms": 3.0, "max_concurrency": "many", "request_rate": [1], "label": [1]}
    axis, found = plot.curves([odd], "median_ttft_ms")
    assert (axis, found) == ("request throughput (req/s)", {"[1]": [(0.0, 3.0)]})
    with pytest.raises(ValueError, match="no latencies to draw"):
        plot.draw([theirs, {"median_ttft_ms": "q"}], tmp_path / "x.png")


def test_compare_says_where_lengths_differ():
    first, second = made(), made()
    second["total_input_tokens"] = first["total_input_tokens"] * 2
    text = compare.table(["a", "b"], [first, second])
    assert "input tokens per request differ: " in text
    assert "output tokens" not in text.split("input tokens per request")[1]
    assert "differ" not in compare.table(["a", "b"], [first, made()])
