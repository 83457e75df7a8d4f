"""Where the two sides run: a CPU for each, and before the machine's other processes where what is measured is time."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import psutil

from oneloop_bench.server import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oneloop_bench.serve_null.client import Counts
    from oneloop_bench.server import Server


class Cpus(NamedTuple):
    """One for each side; the same where there is only one."""

    server: int
    client: int


def choose_cpus() -> Cpus:
    """The first two that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return Cpus(usable[0], usable[-1] if len(usable) < 2 else usable[1])


@contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """Run on this CPU meanwhile, and so does whatever process begins meanwhile, for good."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def undisturbed() -> Iterator[bool]:
    """Before all other processes meanwhile, and so is what begins meanwhile, for good. False where that is not allowed.

    Else what is measured on a busy machine is its other processes' time slices, which are as long as a step.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, priority)


@contextmanager
def null_server(cpus: Cpus, num_streams: int, num_tokens: int, step_ms: float = 0.0) -> Iterator[Server]:
    """A ready server with room for the streams; this process is on the client's CPU meanwhile.

    num_tokens: of each stream's output, beside a prompt of up to 64. step_ms: what a step takes.
    """
    num_blocks = num_streams * ((num_tokens + 64) // 16 + 4)
    options = ["--executor", "null", "--null-step-ms", str(step_ms), "--max-num-seqs", str(num_streams)]
    options += ["--max-model-len", str(num_tokens + 64), "--num-gpu-blocks-override", str(num_blocks)]
    with on_cpu(cpus.server), running_server(*options, model="null") as server, on_cpu(cpus.client):
        server.wait_ready()
        yield server


class Shares:
    """CPU time of the server and of this process since it was made."""

    def __init__(self, pid: int) -> None:
        self._processes = (psutil.Process(pid), psutil.Process())
        self._before = self._now()

    def _now(self) -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in self._processes]

    def us_per_event(self, counts: Counts) -> dict[str, float]:
        """Of both, in µs."""
        spent = [after - before for after, before in zip(self._now(), self._before, strict=True)]
        server, client = (round(seconds / counts.num_events * 1e6, 2) for seconds in spent)
        return {"server_us_per_event": server, "client_us_per_event": client}
