"""A run over one client in this process, or over several in processes of their own.

A process is `python -m oneloop_bench.load.processes`: it gets its job as JSON on standard input, says "ready", gets the
moment at which the run starts, says how many requests are done now and then, and ends with its records.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import orjson

from oneloop.cli.serve import allow_many_descriptors
from oneloop_bench.load.client import Client, without_collector
from oneloop_bench.load.record import Record, pack, unpack
from oneloop_bench.load.workload import Asking, Job, Session, Turn

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable

START_AFTER_S = 0.1
"""Between the last "ready" and the start, so that all processes have heard of it."""
TELL_EVERY_S = 0.25
TELL_LIMIT_S = 30.0
"""How long clients that were told to stop may take to tell what they have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave."""

    records: list[Record]
    begin: float
    """When it started (perf_counter)."""
    cpu_s: list[float]
    """CPU seconds of each client."""
    is_interrupted: bool = False
    """Whether it was ended by Ctrl-C: then there are records of what had ended by then."""


def run(job: Job, num_processes: int, on_done: Callable[[int], None]) -> Outcome:
    """Run the job. RuntimeError when a client ends without its records.

    on_done: called now and then with how many requests have ended since.
    """
    allow_many_descriptors()
    if num_processes == 1:
        return _run_here(job, on_done)
    return asyncio.run(_run_in_processes(parts(job, num_processes), on_done))


def parts(job: Job, count: int) -> list[Job]:
    """Sessions dealt out in turn, concurrency shared. As many parts as have something to do."""
    count = min(count, len(job.sessions), job.max_concurrency or count) or 1
    shared = [None] * count if job.max_concurrency is None else _shares(job.max_concurrency, count)
    return [
        replace(
            job,
            sessions=job.sessions[place::count],
            starts=job.starts[place::count],
            numbers=job.numbers[place::count],
            max_concurrency=share,
        )
        for place, share in enumerate(shared)
    ]


def _shares(total: int, count: int) -> list[int | None]:
    return [total // count + (place < total % count) for place in range(count)]


def _run_here(job: Job, on_done: Callable[[int], None]) -> Outcome:
    client = Client(job, lambda: on_done(1))
    is_interrupted = False
    with without_collector():
        begin, cpu = perf_counter(), time.process_time()
        try:
            asyncio.run(client.run(begin))
        except KeyboardInterrupt:
            is_interrupted = True
        return Outcome(client.records, begin, [time.process_time() - cpu], is_interrupted)


async def _run_in_processes(jobs: list[Job], on_done: Callable[[int], None]) -> Outcome:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        for _ in jobs
    ]
    try:
        await asyncio.gather(
            *(_hand_over(process, job) for process, job in zip(processes, jobs, strict=True))
        )
        begin = perf_counter() + START_AFTER_S
        following = asyncio.gather(*(_follow(process, begin, on_done) for process in processes))
        is_interrupted = False
        try:
            found = await asyncio.shield(following)
        except asyncio.CancelledError:  # Ctrl-C
            is_interrupted = True
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            found = await asyncio.wait_for(following, TELL_LIMIT_S)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
    records = [record for records, _ in found for record in records]
    records.sort(key=lambda record: record.index)
    return Outcome(records, begin, [cpu_s for _, cpu_s in found], is_interrupted)


async def _hand_over(process: Process, job: Job) -> None:
    """Until the client is ready."""
    data = orjson.dumps(asdict(job))
    await _write(process, b"%d\n%b" % (len(data), data))
    await _line(process)


async def _follow(
    process: Process, begin: float, on_done: Callable[[int], None]
) -> tuple[list[Record], float]:
    """Start the client; its records and CPU seconds."""
    assert process.stdout is not None
    await _write(process, b"%r\n" % begin)
    while True:
        told = orjson.loads(await _line(process))
        on_done(told["done"])
        if "bytes" in told:
            return unpack(await process.stdout.readexactly(told["bytes"])), told["cpu_s"]


async def _write(process: Process, data: bytes) -> None:
    """A process that has ended is told by the line that does not come."""
    assert process.stdin is not None
    process.stdin.write(data)
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a client process ended with status {await process.wait()}; its message is above")
    return line


def read_job(data: bytes) -> Job:
    """From JSON."""
    fields = orjson.loads(data)
    sessions = [
        Session(**{**session, "turns": [Turn(**turn) for turn in session["turns"]]})
        for session in fields["sessions"]
    ]
    return Job(**{**fields, "asking": Asking(**fields["asking"]), "sessions": sessions})


class _Teller:
    """Counts what is done and says so at most every TELL_EVERY_S."""

    def __init__(self) -> None:
        self._count = 0
        self._told_at = 0.0

    def done(self) -> None:
        """One more."""
        self._count += 1
        if perf_counter() - self._told_at >= TELL_EVERY_S:
            self._tell({})

    def end(self, records: list[Record], cpu_s: float) -> None:
        """The result."""
        data = pack(records)
        self._tell({"bytes": len(data), "cpu_s": cpu_s})
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def _tell(self, more: dict[str, float]) -> None:
        sys.stdout.buffer.write(orjson.dumps({"done": self._count, **more}) + b"\n")
        sys.stdout.buffer.flush()
        self._count, self._told_at = 0, perf_counter()


async def _run_until_told(client: Client, begin: float) -> None:
    """To the end, or to SIGTERM."""
    running = asyncio.ensure_future(client.run(begin))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main() -> None:
    """Be a client process. Ctrl-C is for the parent, which then sends SIGTERM: what has ended is told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_descriptors()
    standard_input = sys.stdin.buffer
    job = read_job(standard_input.read(int(standard_input.readline())))
    teller = _Teller()
    client = Client(job, teller.done)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    begin = float(standard_input.readline())
    with without_collector():
        cpu = time.process_time()
        asyncio.run(_run_until_told(client, begin))
        cpu = time.process_time() - cpu
    teller.end(client.records, cpu)


if __name__ == "__main__":
    main()
