"""A picture of decode steps from a profiler's trace: what ran when, and how long the device idled between steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from oneloop_bench.gaps import Event, borders, idle_times

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TARGET_US: Final = 10.0
"""Idle between steps, at most (issue B)."""
NUM_STEPS: Final = 3
_WIDTH, _LEFT, _RIGHT = 1000, 20, 20
_LANES, _LANE = 3, 12
_ZOOM_US: Final = 40.0
"""Before and after a border."""
_COLOURS: Final = ("#4878a8", "#e49444", "#6a9f58", "#85b6b2", "#967662", "#a87c9f", "#e7ca60", "#b3b3b3")
"""The last is that of all further kernels."""
_MARK: Final = "#d1342f"
_BAR_AREA: Final = 120


@dataclass(frozen=True, slots=True)
class Trace:
    """Whole steps of one batch size, and what gap_summary says of them."""

    batch: int
    events: Sequence[Event]
    summary: Mapping[str, Any]


def gap_picture(model: str, traces: Sequence[Trace], shown: Sequence[int]) -> str:
    """An SVG. shown: batch sizes whose steps are drawn; the gaps of all are. ValueError: one has no four steps."""
    drawn = [trace for trace in traces if trace.batch in shown]
    colours = _colours([event for trace in drawn for event in _first_steps(trace)])
    parts = [_text(_LEFT, 22, f"{model}: decode steps in the profiler's trace", size=15)]
    y = 36.0
    for trace in drawn:
        parts += _panel(trace, colours, y)
        y += 168
    parts += _legend(colours, y)
    y += 40
    parts += _bars(traces, y)
    height = y + _BAR_AREA + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'font-family="sans-serif" fill="#333"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _first_steps(trace: Trace) -> list[Event]:
    begins = borders(trace.events)
    if len(begins) <= NUM_STEPS:
        raise ValueError(
            f"the trace of batch {trace.batch} has {len(begins)} steps; {NUM_STEPS + 1} are needed"
        )
    return [event for event in trace.events if begins[0] <= event[0] < begins[NUM_STEPS]]


def _panel(trace: Trace, colours: Mapping[str, str], top: float) -> list[str]:
    """Three steps, and below the border between the first two from near."""
    events = _first_steps(trace)
    begins = borders(trace.events)
    summary = trace.summary
    title = (
        f"batch {trace.batch}: {NUM_STEPS} steps of {summary['step_p50'] / 1e3:.2f} ms; idle between steps "
        f"{summary['border']['p50']:.1f} µs (p50 of {summary['steps'] - 1}, longest {summary['border']['max']:.1f})"
    )
    parts = [_text(_LEFT, top + 14, title)]
    parts += _strip(events, (begins[0], begins[NUM_STEPS]), colours, top + 22)
    parts.append(
        _text(_LEFT, top + 94, f"the border between the first two, {_ZOOM_US:.0f} µs before and after")
    )
    parts += _strip(trace.events, (begins[1] - _ZOOM_US, begins[1] + _ZOOM_US), colours, top + 100)
    return parts


def _strip(
    events: Sequence[Event], window: tuple[float, float], colours: Mapping[str, str], top: float
) -> list[str]:
    """Bars of all events in the window, one path per colour; idle time between steps in red with its length."""
    first, last = window
    scale = (_WIDTH - _LEFT - _RIGHT) / (last - first)

    def x(time: float) -> float:
        return _LEFT + (min(max(time, first), last) - first) * scale

    height = _LANES * _LANE
    parts = [f'<rect x="{_LEFT}" y="{top:g}" width="{x(last) - _LEFT:g}" height="{height}" fill="#f2f2f2"/>']
    paths: dict[str, list[str]] = defaultdict(list)
    for lane, (begin, end, name) in _in_lanes(events):
        if end > first and begin < last:
            colour = colours.get(name, _COLOURS[-1])
            width = max(0.3, x(end) - x(begin))
            paths[colour].append(
                f"M{x(begin):.1f} {top + lane * _LANE:g}h{width:.1f}v{_LANE - 1}h-{width:.1f}z"
            )
    parts += [f'<path fill="{colour}" d="{"".join(shapes)}"/>' for colour, shapes in paths.items()]
    parts += _marks(events, window, x, top)
    parts += _axis(window, x, top + height)
    return parts


def _marks(
    events: Sequence[Event], window: tuple[float, float], x: Callable[[float], float], top: float
) -> list[str]:
    """Every border in the window."""
    parts = []
    for idle in idle_times(events):
        end = idle.begin + idle.us
        if not idle.at_border or not window[0] < end < window[1]:
            continue
        width = max(1.0, x(end) - x(idle.begin))
        parts.append(
            f'<rect x="{x(idle.begin):.1f}" y="{top - 3:g}" width="{width:.1f}" '
            f'height="{_LANES * _LANE + 6}" fill="{_MARK}"/>'
        )
        parts.append(
            _text(x(end) + 3, top + _LANES * _LANE - 2, f"{idle.us:.1f} µs idle", colour=_MARK, size=11)
        )
    return parts


def _axis(window: tuple[float, float], x: Callable[[float], float], top: float) -> list[str]:
    """A mark at every round number of µs since the window's begin."""
    span = window[1] - window[0]
    step = next(
        size * 10**power for power in range(9) for size in (1, 2, 5) if span / (size * 10**power) <= 10
    )
    parts = []
    for number in range(int(span / step) + 1):
        at = x(window[0] + number * step)
        parts.append(f'<path d="M{at:.1f} {top:g}v4" stroke="#888"/>')
        anchor = "start" if not number else "end" if at > _WIDTH - 2 * _RIGHT else "middle"
        parts.append(_text(at, top + 15, f"{number * step} µs", size=10, anchor=anchor))
    return parts


def _in_lanes(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Kernels that overlap lie in lanes of their own, as far as there are any."""
    ends = [float("-inf")] * _LANES
    placed = []
    for event in events:
        lane = next((number for number, end in enumerate(ends) if end <= event[0]), _LANES - 1)
        ends[lane] = max(ends[lane], event[1])
        placed.append((lane, event))
    return placed


def _colours(events: Sequence[Event]) -> dict[str, str]:
    """Kernels by the time they take; those that take the least share a colour and have no entry."""
    totals: dict[str, float] = defaultdict(float)
    for begin, end, name in events:
        totals[name] += end - begin
    longest = sorted(totals, key=lambda name: -totals[name])
    return dict(zip(longest, _COLOURS[:-1], strict=False))


def _legend(colours: Mapping[str, str], top: float) -> list[str]:
    parts = []
    entries = [*colours.items(), ("others", _COLOURS[-1])]
    for number, (name, colour) in enumerate(entries):
        left, y = _LEFT + number % 4 * 240, top + number // 4 * 16
        parts.append(f'<rect x="{left}" y="{y:g}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(left + 14, y + 9, name[:36], size=11))
    return parts


def _bars(traces: Sequence[Trace], top: float) -> list[str]:
    """Idle time between steps by batch size, beside what it may be."""
    most = max([TARGET_US, *(trace.summary["border"]["p50"] for trace in traces)]) * 1.1
    base = top + 24 + _BAR_AREA
    scale = _BAR_AREA / most
    parts = [_text(_LEFT, top + 14, "device idle between two steps, p50, by batch size")]
    limit = base - TARGET_US * scale
    parts.append(
        f'<path d="M{_LEFT} {limit:.1f}H{_WIDTH - _RIGHT}" stroke="{_MARK}" stroke-dasharray="5 4"/>'
    )
    parts.append(
        _text(_WIDTH - _RIGHT, limit - 4, f"to reach: {TARGET_US:.0f} µs", anchor="end", colour=_MARK)
    )
    parts.append(f'<path d="M{_LEFT} {base:g}H{_WIDTH - _RIGHT}" stroke="#888"/>')
    pitch = (_WIDTH - _LEFT - _RIGHT) / len(traces)
    for number, trace in enumerate(traces):
        us = trace.summary["border"]["p50"]
        middle = _LEFT + (number + 0.5) * pitch
        parts.append(
            f'<rect x="{middle - 24:.1f}" y="{base - us * scale:.1f}" width="48" height="{us * scale:.1f}" '
            f'fill="{_COLOURS[0]}"/>'
        )
        parts.append(_text(middle, base - us * scale - 4, f"{us:.1f} µs", anchor="middle"))
        parts.append(_text(middle, base + 15, f"batch {trace.batch}", anchor="middle"))
        within = f"within the step {trace.summary['within']['p50']:.0f} µs"
        parts.append(_text(middle, base + 29, within, anchor="middle", size=10))
    return parts


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = "#333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
