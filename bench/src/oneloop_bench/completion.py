"""How soon a finished step wakes the event loop: the watcher at several naps, against busy polling.

`python -m oneloop_bench.completion [steps]`. On a CUDA device a step is a kernel of about 1 ms and a copy of its number
into pinned memory; without one, a thread that sleeps as long. Latencies are µs over the median of busy polling, which
sees the number as soon as the host can; "cpu" is the process's CPU time over the elapsed time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import statistics
import sys
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from oneloop_bench.report import print_result
from oneloop_core import CompletionWatcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP_S = 1e-3
NAPS_US = (0, 5, 20, 50)
PAUSE_S = 5e-4
"""Between steps, so that each starts with an idle device and a parked watcher."""


class Device(Protocol):
    """Runs one step after another and writes their numbers into `word`."""

    word: NDArray[np.int64]

    def launch(self, number: int) -> None:
        """Start the step with this number; returns at once."""


class Cuda:
    """Steps on the GPU."""

    def __init__(self) -> None:
        self._pinned = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self.word: NDArray[np.int64] = self._pinned.numpy()
        self._number = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._cycles = self._calibrate()

    def launch(self, number: int) -> None:
        """See Device."""
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        self._number.fill_(number)
        self._pinned.copy_(self._number, non_blocking=True)

    @staticmethod
    def _calibrate() -> int:
        cycles = 1_000_000
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(10 * cycles)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return int(10 * cycles * STEP_S / (time.perf_counter() - begin))


class Sleeper:
    """Steps in a thread that sleeps."""

    def __init__(self) -> None:
        self.word: NDArray[np.int64] = np.zeros(1, np.int64)
        self._target = ctypes.c_int64.from_address(self.word.ctypes.data)
        self._steps: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, number: int) -> None:
        """See Device."""
        self._steps.put(number)

    def _run(self) -> None:
        while True:
            number = self._steps.get()
            time.sleep(STEP_S)
            self._target.value = number


def busy_polling(device: Device, first: int, count: int) -> list[float]:
    """Seconds from launch to sight when the host does nothing but look."""
    times = []
    for number in range(first, first + count):
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        device.launch(number)
        while device.word[0] < number:
            time.sleep(0)
        times.append(time.perf_counter() - begin)
    return times


async def watched(device: Device, first: int, count: int, nap_us: int) -> list[float]:
    """The same through the watcher, an eventfd and this event loop."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    watcher = CompletionWatcher(device.word.data, fd, max_nap_us=nap_us)
    woken = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, woken.set)
    times = []
    for number in range(first, first + count):
        await asyncio.sleep(PAUSE_S)
        begin = time.perf_counter()
        device.launch(number)
        watcher.expect(number)
        while watcher.completed < number:
            await woken.wait()
            woken.clear()
            with contextlib.suppress(BlockingIOError):  # the loop may tell twice
                os.eventfd_read(fd)
        times.append(time.perf_counter() - begin)
        woken.clear()
    loop.remove_reader(fd)
    watcher.close()
    os.close(fd)
    return times


def main() -> None:
    """Print the table and the result."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    device: Device = Cuda() if torch.cuda.is_available() else Sleeper()
    busy_polling(device, 1, 20)
    base = statistics.median(busy_polling(device, 21, count))
    print(f"busy polling sees a step after {base * 1e6:.0f} µs")
    first, ways = 21 + count, {}
    for nap_us in NAPS_US:
        cpu, begin = time.process_time(), time.perf_counter()
        times = sorted(asyncio.run(watched(device, first, count, nap_us)))
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        first += count
        p50, p99 = ((times[int(count * part)] - base) * 1e6 for part in (0.5, 0.99))
        ways[f"nap_{nap_us}us"] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "cpu": round(share, 3)}
        print(f"naps of {nap_us:>2} µs: p50 {p50:>7.1f}  p99 {p99:>7.1f}  cpu {share:.0%}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    print_result({"gpu": gpu, "busy_us": round(base * 1e6, 1), "over_busy_polling": ways})


if __name__ == "__main__":
    main()
