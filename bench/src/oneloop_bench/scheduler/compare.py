"""Runs sides through a mix in turns, and holds their schedules against each other and against the mix."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import zip_longest
from typing import TYPE_CHECKING

from oneloop_bench.scheduler.workload import VALUES_PER_ROW, Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop_bench.scheduler.workload import Mix, Side

STEPS_PER_TURN = 10

Row = tuple[int, int, int]
"""Request, tokens computed before the step, tokens of the step."""


class ScheduleError(AssertionError):
    """A schedule is not what it must be; the message names the mix, the step and the request."""


def run_in_turns(mix: Mix, sides: Mapping[str, Side]) -> dict[str, Steps]:
    """The whole mix on each side, a few steps at a time, so that whatever else the machine does hits all of them.

    ScheduleError when they do not do the same, or not what the mix asks for.
    """
    for side in sides.values():
        side.load(mix)
    results = {name: Steps.none() for name in sides}
    order = deque(sides)
    for first in range(0, mix.num_steps, STEPS_PER_TURN):
        for name in order:
            results[name].extend(sides[name].run(min(STEPS_PER_TURN, mix.num_steps - first)))
        order.rotate()  # so that none always finds what the same other one left in the caches
    schedules = {name: [rows_of(flat) for flat in steps.rows] for name, steps in results.items()}
    for schedule in schedules.values():
        check_served(mix, schedule)
    check_same(mix, schedules)
    return results


def rows_of(flat: Sequence[int]) -> list[Row]:
    """The rows of one step of Steps.rows."""
    parts = (flat[at : at + VALUES_PER_ROW] for at in range(0, len(flat), VALUES_PER_ROW))
    return [(request, num_computed, num_scheduled) for request, num_computed, num_scheduled in parts]


def check_served(mix: Mix, schedule: Sequence[Sequence[Row]]) -> None:
    """Whether every request got all its tokens, each once: none was forgotten or preempted."""
    num_computed: dict[int, int] = defaultdict(int)
    for step, rows in enumerate(schedule):
        for request, start, count in rows:
            if request in num_computed and start != num_computed[request]:
                raise ScheduleError(
                    f"{mix.name}, step {step}: request {request} goes on at token {start} after {num_computed[request]}"
                )
            num_computed[request] = start + count
    for number, asked in enumerate(mix.requests):
        needed = len(mix.prompts[asked.prompt]) + asked.max_tokens - 1
        if num_computed[number] != needed:
            raise ScheduleError(
                f"{mix.name}: request {number} got {num_computed[number]} of {needed} tokens in {mix.num_steps} steps"
            )


def check_same(mix: Mix, schedules: Mapping[str, Sequence[Sequence[Row]]]) -> None:
    """Whether the sides ran the same requests with the same tokens in every step.

    A request's first row begins where the cached part of its prompt ends, so this compares cache hits too.
    """
    (first, expected), *others = schedules.items()
    for name, found in others:
        for step, (ours, theirs) in enumerate(zip_longest(expected, found, fillvalue=())):
            if list(ours) == list(theirs):
                continue
            request, start, count = row = min(set(ours) ^ set(theirs))
            has, lacks = (first, name) if row in ours else (name, first)
            raise ScheduleError(
                f"{mix.name}, step {step}: "
                f"{has} gives request {request} {count} tokens after {start}, {lacks} does not"
            )
