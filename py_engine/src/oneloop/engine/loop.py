"""The step loop: the one task that schedules, launches, commits and delivers. It never blocks and never polls.

Two steps are in flight where there is work for them; every step goes through a slab of the ring.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.errors import EngineDeadError
from oneloop_core import SlabError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oneloop.engine.metrics import EngineMetrics
    from oneloop.executor.base import Completion, Executor
    from oneloop_core import Core, Deltas

log = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 2
NUM_SLABS = MAX_STEPS_IN_FLIGHT + 1


@dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    slab_index: int


class StepLoop:
    """Drives the executor with the core's steps until `stop()` or a fault.

    deliver: called with each commit's deltas, after the next step was launched. It is the only loop over requests.
    step_timeout_s: a step that takes longer ends the loop with EngineDeadError.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        slabs: Sequence[memoryview],
        *,
        deliver: Callable[[Deltas], None],
        metrics: EngineMetrics,
        step_timeout_s: float,
    ) -> None:
        self._core = core
        self._executor = executor
        self._slabs = slabs
        self._deliver = deliver
        self._step_timeout_s = step_timeout_s
        self._woken = asyncio.Event()
        self._stopping = False
        self._in_flight: deque[_Step] = deque()
        self._next_slab = 0
        self._clock = asyncio.get_running_loop()
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._completed: deque[Completion] = deque()
        self._fault: EngineDeadError | None = None
        # The header's num_tokens of every slab, as a view.
        header = next(field for field in core.layout.fields if field.name == "header")
        start = header.offset + 8 * core.layout.header["num_tokens"]
        self._step_tokens = [slab[start : start + 8].cast("q") for slab in slabs]
        self._observe_tokens = metrics.iteration_tokens.observe

    def wake(self) -> None:
        """There may be something to schedule. Loop thread only."""
        self._woken.set()

    def stop(self) -> None:
        """End run() without waiting for the steps in flight."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Serve until stop(). Raises what broke: EngineDeadError, an error of the core or of the executor."""
        completion_fd = self._executor.completion_fd()
        self._clock.add_reader(completion_fd, self._take)
        try:
            while not self._stopping:
                self._launch()
                await self._woken.wait()
                self._woken.clear()
                while self._completed:
                    deltas = self._commit(self._completed.popleft())
                    self._launch()
                    self._deliver(deltas)
                if self._fault is not None:
                    raise self._fault
        finally:
            self._clock.remove_reader(completion_fd)
            if self._timer is not None:
                self._timer.cancel()

    def _take(self) -> None:
        """The descriptor is readable. Read here, not in run(): until then the event loop would call again and again."""
        try:
            self._completed.extend(self._executor.completions())
        except EngineDeadError as error:
            self._fault = error
        self._woken.set()

    def _launch(self) -> None:
        """Schedule and submit until nothing is due or enough is in flight."""
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            slab_index = self._next_slab
            step_id = self._core.schedule(self._slabs[slab_index])
            if step_id is None:
                return
            self._executor.submit(slab_index)
            self._observe_tokens(self._step_tokens[slab_index][0])
            if not self._in_flight:
                self._start_watch()
            self._in_flight.append(_Step(step_id, slab_index))
            self._next_slab = (slab_index + 1) % len(self._slabs)

    def _commit(self, completion: Completion) -> Deltas:
        """Results of the oldest step in flight; a step that failed ends its own requests only."""
        step = self._in_flight.popleft()
        self._waiting_since = self._clock.time()
        if completion.slab_index != step.slab_index:
            raise EngineDeadError(
                f"the executor completed slab {completion.slab_index} while slab {step.slab_index} was due"
            )
        if completion.error is not None:
            log.error("step %d failed: %s", step.step_id, completion.error)
            return self._core.fail(step.step_id, completion.error)
        try:
            return self._core.commit(step.step_id, self._slabs[step.slab_index])
        except SlabError as error:
            log.exception("step %d brought back a result that cannot be", step.step_id)
            return self._core.fail(step.step_id, f"the step's result is invalid: {error}")

    def _start_watch(self) -> None:
        self._waiting_since = self._clock.time()
        if self._timer is None:
            self._timer = self._clock.call_at(self._waiting_since + self._step_timeout_s, self._check_watch)

    def _check_watch(self) -> None:
        """The timer fired: give up on a step that is overdue, or look again when the present one would be."""
        self._timer = None
        if not self._in_flight:
            return
        due = self._waiting_since + self._step_timeout_s
        if self._clock.time() < due:
            self._timer = self._clock.call_at(due, self._check_watch)
            return
        step_id = self._in_flight[0].step_id
        self._fault = EngineDeadError(f"step {step_id} did not complete within {self._step_timeout_s:g} s")
        self._woken.set()
