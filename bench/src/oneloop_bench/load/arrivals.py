"""When requests are sent in an open loop: whether or not the server keeps up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that grows from the first request to the last."""

    strategy: Strategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_rps <= self.end_rps or not self.end_rps:
            raise ValueError("--ramp-up-start-rps must be from 0 to --ramp-up-end-rps, which must be above 0")
        if self.strategy == "exponential" and not self.start_rps:
            raise ValueError("--ramp-up-start-rps must be above 0: from 0 nothing grows exponentially")

    def rates(self, count: int) -> NDArray[np.float64]:
        """Requests per second, [count], float64."""
        progress = np.linspace(0.0, 1.0, count)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(
    count: int,
    rate: float,
    rng: np.random.Generator,
    *,
    burstiness: float = 1.0,
    ramp_up: RampUp | None = None,
) -> list[float]:
    """Seconds from the start of the run, the first 0. rate: per second; inf: all at once; ramp_up is used instead.

    Gaps are gamma distributed with shape `burstiness` and mean 1/rate: 1 makes a Poisson process, less comes in bursts,
    more comes evenly. ValueError for what is not above 0.
    """
    if not burstiness > 0:
        raise ValueError("--burstiness must be above 0")
    if not rate > 0:
        raise ValueError("--request-rate must be above 0 (or inf)")
    if count == 0:
        return []
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    rates = np.full(count, rate) if ramp_up is None else ramp_up.rates(count)
    # A linear ramp may start at 0, where the next request would never come: its gap is that of the rate after it.
    rates = np.where(rates > 0, rates, np.roll(rates, -1)) if count > 1 else np.maximum(rates, 1e-9)
    gaps = rng.gamma(burstiness, 1.0 / (rates[:-1] * burstiness))
    times: list[float] = np.concatenate(([0.0], np.cumsum(gaps))).tolist()
    return times
