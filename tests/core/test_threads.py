"""submit() and abort() from other threads while the loop's thread is inside the core."""

from __future__ import annotations

import random
import sys
import threading
import time


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


def test_schedule_and_commit_let_other_threads_run(make_harness) -> None:
    """With a switch interval of a minute another thread gets on only where a call gives up the GIL."""
    harness = make_harness()
    harness.core.submit([1, 2, 3], max_tokens=400)
    ready, stop = threading.Event(), threading.Event()
    turns = [0]

    def other() -> None:
        ready.set()
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    sys.setswitchinterval(60)
    try:
        seen = turns[0]
        slab = harness.ring[0]
        for _ in range(300):
            step = harness.core.schedule(slab.buffer)
            slab["output_token"][0] = 1
            harness.core.commit(step, slab.buffer)
        progress = turns[0] - seen
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert progress > 10
