"""What the device waits for, from a profiler's trace: between steps, and within them. No GPU is needed here."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

Event = tuple[float, float, str]
"""Begin and end in µs, name: a kernel or a copy."""
STEP_BEGINS: Final = "_fetch_kernel"
"""The first kernel of a step."""
_PAIRS: Final = 6
"""Of neighbours that the device idles between, as many as this are named."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A time in which nothing ran. before, after: names of what ran. at_border: a step begins after it."""

    begin: float
    us: float
    before: str
    after: str

    @property
    def at_border(self) -> bool:
        """Whether it lies between two steps."""
        return STEP_BEGINS in self.after


def borders(events: Sequence[Event]) -> list[float]:
    """When steps begin, in µs."""
    return [begin for begin, _, name in events if STEP_BEGINS in name]


def whole_steps(events: Sequence[Event], skip: int) -> list[Event]:
    """Sorted events from the begin of step `skip` to the begin of the last, which may have been cut short.

    The first steps of a trace are not as others: the driver prepares each graph for the tracing when it is launched for
    the first time, and the host comes late meanwhile. Nothing when there are not as many steps.
    """
    events = sorted(events)
    begins = borders(events)
    if len(begins) < skip + 2:
        return []
    return [event for event in events if begins[skip] <= event[0] < begins[-1]]


def idle_times(events: Sequence[Event]) -> list[Idle]:
    """Sorted events → every time that no event covers. Kernels may overlap: a programmatic launch begins early."""
    found: list[Idle] = []
    reached, before = None, ""
    for begin, end, name in events:
        if reached is not None and begin > reached:
            found.append(Idle(reached, begin - reached, before, name))
        if reached is None or end > reached:
            reached, before = end, name
    return found


def gap_summary(events: Sequence[Event]) -> dict[str, Any]:
    """Of whole steps, in µs. Empty when there are none.

    border: idle between the last kernel of a step and the first of the next, which the host has to launch in time.
    within: the sum of what is idle between the kernels of a step, for each step. There the host launches two graphs,
    and kernels follow each other that do not begin before their predecessors have ended. pairs: where that is.
    step_p50: from begin to begin, with the tracing on; what it is longer than without comes from the tracing.
    """
    begins = borders(events)
    if not begins:
        return {}
    idles = idle_times(events)
    at_borders = [idle.us for idle in idles if idle.at_border]
    sums = [
        sum(idle.us for idle in idles if not idle.at_border and begin <= idle.begin < end)
        for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True)
    ]
    # Steps that follow without any idle time have a gap of zero.
    at_borders += [0.0] * (len(begins) - 1 - len(at_borders))
    steps = [later - earlier for earlier, later in itertools.pairwise(begins)]
    return {
        "steps": len(begins),
        "border": _of(at_borders),
        "within": _of(sums),
        "pairs": _pairs([idle for idle in idles if not idle.at_border], len(begins)),
        "step_p50": round(statistics.median(steps), 1) if steps else None,
    }


def _of(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"p50": round(statistics.median(values), 2), "max": round(max(values), 2)}


def _pairs(idles: Sequence[Idle], num_steps: int) -> list[dict[str, Any]]:
    """The neighbours with the longest idle time between them, per step."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for idle in idles:
        times[idle.before[:60], idle.after[:60]].append(idle.us)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_PAIRS]
    return [
        {
            "before": before,
            "after": after,
            "per_step": round(len(found) / num_steps, 2),
            "us_p50": round(statistics.median(found), 2),
            "us_per_step": round(sum(found) / num_steps, 2),
        }
        for (before, after), found in longest
    ]
