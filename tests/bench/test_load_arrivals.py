"""Arrivals: the statistics they promise."""

import math

import numpy as np
import pytest

from oneloop_bench.load.arrivals import RampUp, arrival_times


def gaps(count=20_000, rate=10.0, seed=0, **options):
    return np.diff(arrival_times(count, rate, np.random.default_rng(seed), **options))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps(burstiness):
    """Mean 1/rate, coefficient of variation 1/sqrt(shape)."""
    found = gaps(burstiness=burstiness)
    assert found.mean() == pytest.approx(0.1, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_is_one():
    """Of gaps, those longer than t are exp(−t · rate); counts per window have a variance equal to their mean."""
    found = gaps()
    for time_s in (0.05, 0.1, 0.3):
        assert (found > time_s).mean() == pytest.approx(math.exp(-10 * time_s), abs=0.015)
    counts = np.bincount((np.cumsum(found) / 2.0).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_all_at_once():
    assert arrival_times(4, math.inf, np.random.default_rng(0)) == [0.0] * 4


def test_the_first_at_0_and_in_order_and_the_same_for_a_seed():
    times = arrival_times(100, 5.0, np.random.default_rng(3))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times == arrival_times(100, 5.0, np.random.default_rng(3))
    assert times != arrival_times(100, 5.0, np.random.default_rng(4))
    assert arrival_times(0, 5.0, np.random.default_rng(3)) == []
    assert arrival_times(1, 5.0, np.random.default_rng(3)) == [0.0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 52.5), ("exponential", math.sqrt(5 * 100))])
def test_ramp_up(strategy, middle):
    """Many seeds' mean gap around the first, the middle and the last request: the inverse of the rate there."""
    ramp_up = RampUp(strategy, 5.0, 100.0)
    found = np.mean([gaps(1001, math.inf, seed, ramp_up=ramp_up) for seed in range(300)], axis=0)
    for place, rate in ((0, 5.0), (500, middle), (999, 100.0)):
        around = found[max(0, place - 3) : place + 4]
        assert around.mean() == pytest.approx(1 / rate, rel=0.1), (place, rate)


def test_a_ramp_from_0():
    times = arrival_times(50, math.inf, np.random.default_rng(0), ramp_up=RampUp("linear", 0.0, 10.0))
    assert all(math.isfinite(time_s) for time_s in times)
    assert times == sorted(times)


@pytest.mark.parametrize(
    "arguments",
    [("linear", 5.0, 1.0), ("linear", -1.0, 1.0), ("linear", 0.0, 0.0), ("exponential", 0.0, 1.0)],
)
def test_ramps_that_cannot_be(arguments):
    with pytest.raises(ValueError, match="--ramp-up-start-rps must be"):
        RampUp(*arguments)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_rates_that_cannot_be(rate, burstiness):
    with pytest.raises(ValueError, match="must be above 0"):
        arrival_times(10, rate, np.random.default_rng(0), burstiness=burstiness)
