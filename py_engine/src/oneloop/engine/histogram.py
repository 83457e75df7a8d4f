"""Counts of observations per bucket, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Histogram:
    """Observations by upper bounds."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        """Upper bounds (inclusive), ascending; one more bucket takes the rest."""
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """Sum of all observations."""

    def observe(self, value: float, count: int = 1) -> None:
        """Count an observation, `count` times. O(log buckets)."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def add(self, counts: Sequence[int], total: float) -> None:
        """Observations that were counted elsewhere, by the same bounds, and their sum."""
        if any(counts):
            self._counts = [have + more for have, more in zip(self._counts, counts, strict=True)]
            self.total += total

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(upper bound, observations up to it), the last bound being infinity."""
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            running += count
            yield bound, running
