"""CompletionWatcher: every growth of the word wakes the descriptor, soon; parked it costs nothing; closing ends it."""

import asyncio
import ctypes
import gc
import os
import select
import statistics
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from oneloop_core import CompletionWatcher

THREAD_NAME = "oneloop-watch"


class Word:
    """The pinned word's double: written through ctypes, so that no numpy call stands between the store and memory."""

    def __init__(self, value=0):
        self.array = np.full(1, value, np.int64)
        self._target = ctypes.c_int64.from_address(self.array.ctypes.data)

    def set(self, value):
        self._target.value = value


@contextmanager
def watched(word, **options):
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    watcher = CompletionWatcher(word.array, fd, **options)
    try:
        yield watcher, fd
    finally:
        watcher.close()
        os.close(fd)


def readable(fd, seconds):
    return bool(select.select([fd], [], [], seconds)[0])


def watch_threads(count):
    """Ids of this process's watcher threads, once there are `count` of them (a thread names itself when it runs)."""
    deadline = time.monotonic() + 5
    while True:
        tasks = Path("/proc/self/task").iterdir()
        found = [task.name for task in tasks if name_of(task) == THREAD_NAME]
        if len(found) == count or time.monotonic() > deadline:
            assert len(found) == count
            return found
        time.sleep(0.001)


def name_of(task):
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return ""


def cpu_ticks(thread_id):
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_signals_once_the_expected_number_is_there():
    word = Word(7)
    with watched(word) as (watcher, fd):
        watcher.expect(8)
        assert not readable(fd, 0.02)
        word.set(8)
        assert readable(fd, 5)
        assert os.eventfd_read(fd) == 1
        assert watcher.completed == 8
        assert not readable(fd, 0.02)


def test_every_growth_on_the_way_is_told():
    word = Word()
    with watched(word) as (watcher, fd):
        watcher.expect(3)
        for number in (1, 2, 3):
            word.set(number)
            assert readable(fd, 5)
            os.eventfd_read(fd)
        word.set(4)  # nobody expects it
        assert not readable(fd, 0.05)
        watcher.expect(4)  # it is there before it is asked for
        assert readable(fd, 5)


def test_a_number_that_is_there_already_wakes_nobody():
    word = Word(5)
    with watched(word) as (watcher, fd):
        watcher.expect(5)
        watcher.expect(2)
        assert not readable(fd, 0.05)


@pytest.mark.parametrize("options", [{}, {"max_nap_us": 0}, {"max_nap_us": 200}])
def test_ten_thousand_steps_two_in_flight(options):
    """A second thread plays the device: each number is written once the one after it was announced."""
    word, last = Word(), 2_000 if options else 10_000
    with watched(word, **options) as (watcher, fd):
        launched = threading.Semaphore(0)

        def device():
            for number in range(1, last + 1):
                launched.acquire()
                word.set(number)

        thread = threading.Thread(target=device)
        thread.start()
        announced = finished = 0
        while finished < last:
            while announced < min(finished + 2, last):
                announced += 1
                watcher.expect(announced)
                launched.release()
            assert readable(fd, 10)
            os.eventfd_read(fd)
            assert finished <= watcher.completed <= announced
            finished = watcher.completed
        thread.join()


def test_latency_of_a_step_in_flight():
    """Generous, for shared machines; oneloop_bench.completion measures it properly."""
    word = Word()
    waits = []
    with watched(word) as (watcher, fd):
        for number in range(1, 101):
            watcher.expect(number)
            time.sleep(0.002)
            begin = time.perf_counter()
            word.set(number)
            assert readable(fd, 5)
            waits.append(time.perf_counter() - begin)
            os.eventfd_read(fd)
    assert statistics.median(waits) < 0.002


def test_parked_it_uses_no_processor():
    word = Word()
    with watched(word) as (watcher, fd):
        watcher.expect(1)
        word.set(1)
        assert readable(fd, 5)
        (thread_id,) = watch_threads(1)
        time.sleep(0.02)
        before = cpu_ticks(thread_id)
        time.sleep(0.3)
        assert cpu_ticks(thread_id) == before


def test_a_step_that_never_ends_costs_little():
    word = Word()
    with watched(word) as (watcher, _):
        (thread_id,) = watch_threads(1)
        watcher.expect(1)
        time.sleep(0.1)
        before = cpu_ticks(thread_id)
        time.sleep(1.0)
        assert (cpu_ticks(thread_id) - before) / os.sysconf("SC_CLK_TCK") < 0.5


def test_close_ends_a_thread_that_waits_and_one_that_polls():
    for expected in (0, 1):
        with watched(Word()) as (watcher, _):
            watcher.expect(expected)
            watch_threads(1)
            watcher.close()
            watcher.close()
            watch_threads(0)
            with pytest.raises(ValueError, match="closed"):
                watcher.expect(2)


def test_dropping_it_ends_the_thread_before_the_memory_goes():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    watcher = CompletionWatcher(np.zeros(1, np.int64), fd)
    watcher.expect(1)
    watch_threads(1)
    del watcher
    gc.collect()
    watch_threads(0)
    os.close(fd)


def test_the_descriptor_is_its_own():
    word = Word()
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    watcher = CompletionWatcher(word.array, fd)
    os.close(fd)
    other, far = os.pipe()  # gets the freed number
    watcher.expect(1)
    word.set(1)
    assert not readable(other, 0.05)
    watcher.close()
    os.close(other)
    os.close(far)


async def test_wakes_an_event_loop():
    word = Word()
    with watched(word) as (watcher, fd):
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, woken.set)
        watcher.expect(1)
        loop.call_later(0.005, word.set, 1)
        await asyncio.wait_for(woken.wait(), 5)
        loop.remove_reader(fd)


@pytest.mark.parametrize(
    "buffer", [np.zeros(2, np.int64), np.zeros(1, np.int32), b"", np.zeros(9, np.uint8)[1:]]
)
def test_other_buffers_are_refused(buffer):
    fd = os.eventfd(0)
    with pytest.raises(ValueError, match="word: a buffer of"):
        CompletionWatcher(buffer, fd)
    os.close(fd)


@pytest.mark.parametrize("fd", [-1, 1_000_000])
def test_a_descriptor_that_is_not_open_is_refused(fd):
    with pytest.raises(OSError):
        CompletionWatcher(np.zeros(1, np.int64), fd)
    watch_threads(0)
