"""Where the start's seconds go: the parts that a server logs when it is ready."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

from oneloop import AsyncEngine
from oneloop.config import EngineConfig
from oneloop.start_times import StartTimes, process_age_s


def test_parts_add_up_under_their_names():
    times = StartTimes(age_s=2.0)
    for _ in range(2):
        with times.part("a"):
            time.sleep(0.01)
    with times.part("b"), times.part("c"):
        pass
    summary = times.summary()
    assert list(summary) == ["total", "process", "a", "b", "c"]
    assert summary["process"] == 2.0
    assert 0.02 <= summary["a"] < 1.0
    assert summary["total"] >= 2.0 + summary["a"]
    assert re.fullmatch(r"\d\.\d\d s: process 2\.00, a \d\.\d\d, b \d\.\d\d, c \d\.\d\d", str(times))


def test_a_part_that_fails_counts_too():
    times = StartTimes()
    try:
        with times.part("a"):
            time.sleep(0.01)
            raise ValueError
    except ValueError:
        pass
    assert times.seconds["a"] >= 0.01


def test_parts_of_several_threads():
    times = StartTimes()

    def work() -> None:
        for _ in range(200):
            with times.part("shared"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(times.seconds) == ["shared"]


def test_the_age_of_a_process():
    code = "import time; time.sleep(0.2); from oneloop.start_times import process_age_s as f; print(f())"
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took = time.perf_counter() - begin
    assert 0.15 < float(done.stdout) < took + 0.1
    assert process_age_s() > float(done.stdout)


async def test_an_engine_counts_its_start(tiny_model):
    config = EngineConfig.from_flat(
        {
            "model": str(tiny_model),
            "load_format": "dummy",
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 8 << 20,
        }
        | {"device": "cpu"}
    )
    async with AsyncEngine(config) as engine:
        parts = engine.start_times.seconds
        total = engine.start_times.total_s
    assert set(parts) == {
        "locate", "import torch", "import model", "build model", "weights", "tokenizer", "attach", "KV cache",
    }  # fmt: skip
    assert all(0 <= seconds <= total for seconds in parts.values())
