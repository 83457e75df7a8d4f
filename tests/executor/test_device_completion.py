"""Steps that a device ends: their order, their errors, and a device that fails."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest

from oneloop.errors import EngineDeadError
from oneloop.executor.base import Completion
from oneloop.executor.device_completion import DeviceCompletions


@pytest.fixture
def word():
    return np.zeros(1, np.int64)


@pytest.fixture
def completions(word):
    made = DeviceCompletions(word, lambda: True)
    yield made
    made.close()


def readable(completions, limit_s=5.0):
    return bool(select.select([completions], [], [], limit_s)[0])


def test_completions_come_in_order_and_clear_the_descriptor(completions, word):
    numbers = [completions.next_number(slab) for slab in (2, 0, 1)]
    assert numbers == [1, 2, 3]
    for number in numbers:
        completions.launched(number, "no room" if number == 2 else None)
    assert not readable(completions, 0.05)
    assert completions.take() == []
    word[0] = 2
    assert readable(completions)
    assert completions.take() == [Completion(2, None), Completion(0, "no room")]
    assert not readable(completions, 0.05)
    word[0] = 3
    assert readable(completions)
    assert completions.take() == [Completion(1, None)]


def test_waiting_for_the_end_is_bounded(completions, word):
    completions.launched(completions.next_number(0))
    start = time.monotonic()
    assert not completions.wait_idle(0.05)
    assert time.monotonic() - start < 2
    word[0] = 1
    assert completions.wait_idle(5)


def test_a_device_that_fails_is_heard_of(word):
    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    completions = DeviceCompletions(word, fail)
    try:
        completions.launched(completions.next_number(0))
        assert readable(completions, 10)
        with pytest.raises(EngineDeadError, match="RuntimeError"):
            completions.take()
        assert completions.wait_idle(0.1)
    finally:
        completions.close()


def test_a_slow_device_is_asked_and_waited_for(word):
    asked = []
    completions = DeviceCompletions(word, lambda: asked.append(1))
    try:
        completions.launched(completions.next_number(0))
        limit = time.monotonic() + 10
        while not asked and time.monotonic() < limit:
            time.sleep(0.05)
        assert asked
        word[0] = 1
        assert readable(completions)
        assert completions.take() == [Completion(0, None)]
    finally:
        completions.close()
    completions.close()


def test_a_step_launched_after_a_rest_is_not_suspected(word):
    """Only what has been in flight for a whole interval is asked after."""

    def fail():
        raise RuntimeError("asked too early")

    completions = DeviceCompletions(word, fail)
    try:
        time.sleep(1.6)  # over the first look, half way to the second
        completions.launched(completions.next_number(0))
        time.sleep(0.7)  # over the second
        word[0] = 1
        assert readable(completions)
        assert completions.take() == [Completion(0, None)]
    finally:
        completions.close()


def test_a_device_that_was_given_up_is_not_waited_for(completions):
    completions.launched(completions.next_number(0))
    completions.give_up("no more")
    assert completions.wait_idle(5)
    with pytest.raises(EngineDeadError, match="no more"):
        completions.take()
