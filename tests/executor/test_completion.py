"""CompletionQueue: both kinds of descriptor wake an event loop, in order, and lose nothing."""

import asyncio
import select
import threading

import pytest

from oneloop.executor.base import Completion
from oneloop.executor.completion import CompletionQueue


def readable(waiting: CompletionQueue) -> bool:
    return bool(select.select([waiting.fileno()], [], [], 0)[0])


@pytest.fixture(params=[False, True], ids=["eventfd", "pipe"])
def waiting(request):
    completions = CompletionQueue(use_pipe=request.param)
    yield completions
    completions.close()


def test_order_and_clearing(waiting):
    assert not readable(waiting)
    assert waiting.take() == []
    for index in range(3):
        waiting.put(Completion(index, None))
    assert readable(waiting)
    assert [completion.slab_index for completion in waiting.take()] == [0, 1, 2]
    assert not readable(waiting)


@pytest.mark.parametrize("use_pipe", [False, True], ids=["eventfd", "pipe"])
def test_one_at_a_time(use_pipe):
    waiting = CompletionQueue(use_pipe=use_pipe, one_at_a_time=True)
    for index in range(3):
        waiting.put(Completion(index, None))
    for index in range(3):
        assert readable(waiting)
        assert waiting.take() == [Completion(index, None)]
    assert not readable(waiting)
    assert waiting.take() == []
    waiting.close()


def test_a_full_pipe_is_no_trouble(waiting):
    for _ in range(70_000):
        waiting.put(Completion(0, None))
    assert len(waiting.take()) == 70_000


def test_put_after_close_does_nothing(waiting):
    waiting.close()
    waiting.close()
    waiting.put(Completion(0, None))


async def test_a_loop_gets_everything_a_thread_puts(waiting):
    loop = asyncio.get_running_loop()
    found = []
    done = asyncio.Event()

    def take():
        found.extend(waiting.take())
        if len(found) == 2000:
            done.set()

    loop.add_reader(waiting.fileno(), take)
    thread = threading.Thread(target=lambda: [waiting.put(Completion(i, None)) for i in range(2000)])
    thread.start()
    async with asyncio.timeout(10):
        await done.wait()
    loop.remove_reader(waiting.fileno())
    assert [completion.slab_index for completion in found] == list(range(2000))
    await asyncio.to_thread(thread.join)
