"""submit() and abort() from other threads while the loop's thread is inside the core."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from oneloop_core import Core, CoreConfig


def test_submits_and_aborts_from_many_threads(make_harness, reference) -> None:
    harness = make_harness(num_blocks=128)
    expected: dict[int, list[int]] = {}
    aborted: set[int] = set()
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                prompt = [rng.randrange(256) for _ in range(1 + rng.randrange(40))]
                handle = harness.core.submit(prompt, max_tokens=8, temperature=0.0)
                if rng.random() < 0.3:
                    if harness.core.abort(handle):
                        aborted.add(handle)
                else:
                    expected[handle] = prompt
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or harness.core.has_work():
        harness.turn()
    for thread in threads:
        thread.join()
    assert not errors
    harness.assert_empty()
    assert len(expected) + len(aborted) <= 240
    for handle, prompt in expected.items():
        assert harness.outputs[handle, 0].token_ids == reference(prompt, 8)
    assert not any(harness.outputs[handle, 0].finish_reason for handle in aborted)


@pytest.fixture
def turns() -> Iterator[Callable[[], int]]:
    """Turns of a second thread. With a switch interval of a minute it gets on only where a call gives up the GIL."""
    ready, stop = threading.Event(), threading.Event()
    count = 0

    def other() -> None:
        nonlocal count
        ready.set()
        while not stop.is_set():
            count += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    sys.setswitchinterval(60)
    yield lambda: count
    sys.setswitchinterval(interval)
    stop.set()
    thread.join()


def test_long_calls_let_other_threads_run(make_harness, turns: Callable[[], int]) -> None:
    """A prompt of 500,000 tokens, computed in one step: each call takes long enough for a waiting thread to wake."""
    long = 500_000
    sizes = {"max_model_len": 2 * long, "max_num_batched_tokens": 2 * long, "num_blocks": 40_000}
    harness = make_harness(max_num_seqs=2, **sizes)
    prompt = np.arange(long, dtype=np.int32) % 256
    slab = harness.ring[0]
    progress = {"submit": 0, "schedule": 0, "commit": 0}
    for turn in range(20):
        prompt[0] = turn
        before = turns()
        harness.core.submit(prompt, max_tokens=1, cache_salt=bytes([turn]))
        submitted = turns()
        step = harness.core.schedule(slab.buffer)
        scheduled = turns()
        slab["output_token"][0] = 1
        assert len(harness.core.commit(step, slab.buffer)) == 1
        progress["submit"] += submitted - before
        progress["schedule"] += scheduled - submitted
        progress["commit"] += turns() - scheduled
    assert min(progress.values()) > 0, progress


def test_making_a_core_lets_other_threads_run(turns: Callable[[], int]) -> None:
    """A pool of 1,000,000 blocks: some ten milliseconds and more, by the machine."""
    config = CoreConfig(num_blocks=1_000_000, vocab_size=256, max_steps_in_flight=2)
    before = turns()
    for _ in range(20):
        Core(config)
    assert turns() > before
