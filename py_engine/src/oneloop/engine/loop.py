"""The step loop: schedules, launches, commits and delivers, as steps end. It never blocks and never polls.

Two steps are in flight where there is work for them; every step goes through a slab of the ring. A step whose samples
have masks that depend on the step before it is launched up to its logits; it is sampled once that one is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from oneloop.engine.idle import IdleWork
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
_STOOD_STILL_S = 1.0
"""A timer that fires so late tells that the whole process was stopped, as a container is while it is paused."""


@dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    slab_index: int


class StepLoop:
    """Drives the executor with the core's steps until `stop()` or a fault.

    deliver: called with each commit's deltas, after the next step was launched. It is the only loop over requests.
    is_expecting: whether a request is on its way to the core, so that it is no time for idle work.
    step_timeout_s: a step that takes longer ends the loop with EngineDeadError.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        slabs: Sequence[memoryview],
        *,
        deliver: Callable[[Deltas], None],
        is_expecting: Callable[[], bool],
        metrics: EngineMetrics,
        step_timeout_s: float,
    ) -> None:
        self._core = core
        self._executor = executor
        self._slabs = slabs
        self._deliver = deliver
        self._step_timeout_s = step_timeout_s
        self._clock = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._clock.create_future()
        self._wake_is_due = False
        self._in_flight: deque[_Step] = deque()
        self._held: _Step | None = None
        """The newest step, while it waits for its masks."""
        self._next_slab = 0
        self._waiting_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        header = next(field for field in core.layout.fields if field.name == "header")
        end = header.offset + 8 * header.length
        self._headers = [slab[header.offset : end].cast("q") for slab in slabs]
        index = core.layout.header
        self._num_tokens, self._num_masked = index["num_tokens"], index["num_masked"]
        self._masks_wait = index["masks_wait"]
        self._observe_tokens = metrics.iteration_tokens.observe
        self._times = metrics.loop
        self._is_expecting = is_expecting
        self._idle = IdleWork(self._clock, self._prepare, self._is_idle)

    def wake(self) -> None:
        """There may be something to schedule. Loop thread only."""
        if not self._wake_is_due:
            self._wake_is_due = True
            self._clock.call_soon(self._woken)

    def stop(self) -> None:
        """End run() without waiting for the steps in flight."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def run(self) -> None:
        """Serve until stop(). Raises what broke: EngineDeadError, an error of the core or of the executor."""
        completion_fd = self._executor.completion_fd()
        self._times.urgent.add(completion_fd)
        try:
            self._clock.add_reader(completion_fd, self._completed)
            self.wake()
            await self._ended
        finally:
            self._clock.remove_reader(completion_fd)
            self._times.urgent.discard(completion_fd)
            self._idle.stop()
            if self._timer is not None:
                self._timer.cancel()

    def _woken(self) -> None:
        """Something was submitted, or it is the start."""
        self._wake_is_due = False
        self._guarded(self._launch)

    def _completed(self) -> None:
        """The descriptor is readable. All of a step's work is done here: a task would run a turn of the loop later."""
        self._guarded(self._take)

    def _guarded(self, work: Callable[[], None]) -> None:
        """An exception, whatever it is, ends run()."""
        if self._ended.done():
            return
        try:
            work()
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _take(self) -> None:
        """Commit what has ended; each time the next step is launched before anyone hears of the last one."""
        parts = self._times.parts
        for completion in self._executor.completions():
            began = perf_counter()
            deltas = self._commit(completion)
            parts["commit"] += perf_counter() - began
            if self._held is not None:
                self._sample(self._held)
                self._held = None
            self._launch()
            began = perf_counter()
            self._deliver(deltas)
            parts["deliver"] += perf_counter() - began

    def _launch(self) -> None:
        """Schedule and submit until nothing is due or enough is in flight."""
        parts = self._times.parts
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            slab_index = self._next_slab
            began = perf_counter()
            step_id = self._core.schedule(self._slabs[slab_index])
            scheduled = perf_counter()
            parts["schedule"] += scheduled - began
            if step_id is None:
                if not self._in_flight:
                    self._idle.begin()
                return
            self._executor.submit(slab_index)
            parts["submit"] += perf_counter() - scheduled
            step, header = _Step(step_id, slab_index), self._headers[slab_index]
            self._observe_tokens(header[self._num_tokens])
            if header[self._num_masked]:
                if self._in_flight and header[self._masks_wait]:
                    self._held = step
                else:
                    self._sample(step)
            if not self._in_flight:
                self._idle.stop()
                self._start_watch()
            self._in_flight.append(step)
            self._next_slab = (slab_index + 1) % len(self._slabs)

    def _sample(self, step: _Step) -> None:
        """Fill the masks of a step that has some, now that all they depend on is committed, and have it sampled."""
        began = perf_counter()
        self._core.fill_masks(step.step_id, self._slabs[step.slab_index])
        self._executor.sample(step.slab_index)
        self._times.parts["mask"] += perf_counter() - began

    def _is_idle(self) -> bool:
        return not (self._in_flight or self._wake_is_due or self._ended.done() or self._is_expecting())

    def _prepare(self) -> bool:
        """Have the executor prepare something; False when there is no more, or the loop has ended with its fault."""
        began = perf_counter()
        more = False

        def prepare() -> None:
            nonlocal more
            more = self._executor.prepare_in_idle()

        self._guarded(prepare)
        self._times.parts["prepare"] += perf_counter() - began
        return more

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
        timer, self._timer = self._timer, None
        if not self._in_flight:
            return
        now = self._clock.time()
        if timer is not None and now - timer.when() > _STOOD_STILL_S:
            self._waiting_since = now  # the step stood still as we did
        due = self._waiting_since + self._step_timeout_s
        if now < due:
            self._timer = self._clock.call_at(due, self._check_watch)
            return
        step_id = self._in_flight[0].step_id
        if not self._ended.done():
            fault = EngineDeadError(f"step {step_id} did not complete within {self._step_timeout_s:g} s")
            self._ended.set_exception(fault)
