"""The live view's bench: which windows are which, and what it makes of gaps that are known."""

import numpy as np

from oneloop_bench.live_view import compare, is_looked_at


def test_every_second_window_is_looked_at():
    found = [is_looked_at(now, 10.0, 2.0) for now in (9.0, 10.0, 11.9, 12.0, 13.9, 14.0, 16.5)]
    assert found == [False, False, False, True, True, False, True]


def figures(slower):
    """50 windows of a second of random gaps of about 5 ms; longer by this factor where somebody looks."""
    source = np.random.default_rng(1)
    times = np.arange(100.0, 150.5, 1e-3)
    gaps = 0.005 * source.lognormal(0.0, 0.2, len(times))
    looked_at = np.floor(times - 100.0).astype(int) % 2 == 1
    return compare(times, np.where(looked_at, gaps * slower, gaps), 100.0, 1.0)


def test_a_view_that_costs_nothing():
    result = figures(1.0)
    low, high = result["interval"]
    assert result["num_pairs"] == 25
    assert low < result["itl_p99_ratio"] < high
    assert low < 1.0 < high


def test_a_view_that_costs_a_tenth():
    result = figures(1.1)
    assert result["interval"][0] > 1.02
    assert 1.05 < result["itl_p99_ratio"] < 1.15
    assert result["looked_at_ms"]["p50"] > 1.05 * result["alone_ms"]["p50"]
