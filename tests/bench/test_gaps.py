"""The host gap: what of a trace is idle time between steps and within them, and the picture of it."""

import xml.etree.ElementTree as ElementTree

import pytest

from oneloop_bench.gap_picture import Trace, gap_picture
from oneloop_bench.gaps import borders, gap_summary, idle_times, whole_steps

FETCH = "void _fetch_kernel"


def step(begin):
    """One of 100 µs: 3 µs idle after the fetch, an overlap, 5 µs idle before the last kernel, which ends at 96."""
    parts = [(0, 10, FETCH), (13, 50, "norm"), (40, 80, "product"), (60, 70, "short"), (85, 96, "sample")]
    return [(begin + first, begin + last, name) for first, last, name in parts]


def trace(count, length=100.0):
    return [event for number in range(count) for event in step(number * length)]


def test_overlapping_kernels_leave_no_gap():
    found = idle_times(step(0))
    assert [(idle.us, idle.before, idle.after) for idle in found] == [
        (3, FETCH, "norm"),
        (5, "product", "sample"),
    ]
    assert idle_times([]) == []


def test_between_steps_and_within_are_told_apart():
    summary = gap_summary(trace(4))
    assert summary["steps"] == 4
    assert summary["border"] == {"p50": 4, "max": 4}
    assert summary["within"] == {"p50": 8, "max": 8}
    assert summary["step_p50"] == 100
    assert summary["pairs"][0] == {
        "before": "product", "after": "sample", "per_step": 1, "us_p50": 5, "us_per_step": 5,
    }  # fmt: skip


def test_one_late_step_moves_the_longest_but_not_the_median():
    events = trace(5)
    late = [(begin + 200, end + 200, name) for begin, end, name in step(500)]
    summary = gap_summary(events + late)
    assert summary["border"] == {"p50": 4, "max": 204}
    assert summary["within"]["max"] == 8


def test_a_step_that_follows_at_once_counts_as_no_gap():
    summary = gap_summary(trace(4, length=96.0))
    assert summary["border"] == {"p50": 0, "max": 0}


def test_only_whole_steps_count_once_the_tracing_has_settled():
    events = [(-50.0, -40.0, "of the step before"), *reversed(trace(6)), (596.0, 597.0, "later")]
    found = whole_steps(events, 2)
    assert borders(found) == [200, 300, 400]
    assert len(found) == 15
    assert whole_steps(events, 5) == []
    assert gap_summary([]) == {}


def test_the_picture_marks_each_border_and_names_each_batch():
    traces = [Trace(batch, trace(6), gap_summary(trace(6))) for batch in (1, 64, 512)]
    picture = gap_picture("a<b", traces, (1, 512))
    root = ElementTree.fromstring(picture)  # well-formed, names escaped
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(text == "4.0 µs idle" for text in texts) == 2 * (2 + 1)  # of three steps, and once from near
    assert [text for text in texts if text.startswith("batch 64")] == ["batch 64"]
    assert "batch 512: 3 steps of 0.10 ms; idle between steps 4.0 µs (p50 of 5, longest 4.0)" in texts
    assert {"norm", "product", "others", "to reach: 10 µs"} <= set(texts)
    with pytest.raises(ValueError, match="batch 1 has 3 steps"):
        gap_picture("m", [Trace(1, trace(3), gap_summary(trace(3)))], (1,))


def test_a_picture_of_long_steps_stays_small():
    kernels = [(float(i), i + 0.9, f"kernel {i % 12}") for i in range(1, 300)]
    events = [
        (begin + 300 * number, end + 300 * number, name)
        for number in range(20)
        for begin, end, name in [(0.0, 0.5, FETCH), *kernels]
    ]
    traces = [Trace(batch, events, gap_summary(events)) for batch in (1, 512)]
    assert len(gap_picture("m", traces, (1, 512))) < 100_000
