"""The core alone: µs per step of running decodes, per delivery of their deltas, per admission of a cached prompt.

`python -m oneloop_bench.micro.core`. The executor is a table of real text; its share of the time is not counted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from oneloop.executor.null import NullSampler, tokens_of_text
from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import embedded_path
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop_bench.report import print_result
from oneloop_bench.slab import Slab
from oneloop_core import BUILD_PROFILE, Core, CoreConfig

if TYPE_CHECKING:
    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_core import Deltas

BATCHES = (64, 256, 1024)
STEPS_IN_FLIGHT = 2
NUM_WARM_UP_STEPS = 50
NUM_STEPS = 600
BLOCK_SIZE = 16
PROMPT_TOKENS = 48
"""Of the longest prompt. Lengths differ, so that every step has its share of rows that begin a new block."""
CACHED_PROMPT_TOKENS = 8192
NUM_ADMISSIONS = 300

TEXT = """A scheduler decides at every step which requests run, how many tokens each of them gets and where their keys
and values lie. "It cannot wait," she said; "neither can they." In 2024 the record stood at 1,234.56 µs (±0.7 %).

def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

Die Straße führt über Köln nach Zürich; déjà vu à l'hôtel. 春眠不觉晓,处处闻啼鸟。夜来风雨声,花落知多少。
ありがとうございます。 Привет, мир! 👩‍🚀🚀 The end is never quite the end: {"key": [1, 2, 3], "ok": true}
"""


@dataclass(frozen=True)
class StepTimes:
    """Medians over the measured steps, in µs."""

    schedule: float
    commit: float
    step: float
    deliver: float


def measure_steps(tokenizer: Tokenizer, batch: int) -> StepTimes:
    """`batch` decodes with two steps in flight: what one turn of the loop spends in the core."""
    device = NullSampler(batch, tokens_of_text(tokenizer.encode(TEXT)))
    num_tokens = NUM_WARM_UP_STEPS + NUM_STEPS + STEPS_IN_FLIGHT
    config = CoreConfig(
        num_blocks=batch * (-(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE) + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch * PROMPT_TOKENS),
        max_model_len=2048,
        vocab_size=tokenizer.vocab_size,
    )
    core = Core(config, tokenizer.vocabulary)
    ring = [Slab(core.layout) for _ in range(STEPS_IN_FLIGHT + 1)]
    rng = np.random.default_rng(0)
    fill_cache(core, ring[0], rng)
    for index in range(batch):
        length = PROMPT_TOKENS - index % BLOCK_SIZE
        prompt = rng.integers(0, tokenizer.vocab_size, length, dtype=np.int32)
        core.submit(prompt.data, max_tokens=num_tokens, ignore_eos=True)

    pending = core.schedule(ring[0].buffer)
    times = []
    for turn in range(NUM_WARM_UP_STEPS + NUM_STEPS):
        current, following = ring[turn % len(ring)], ring[(turn + 1) % len(ring)]
        device.sample(current.views)
        assert pending is not None
        start = time.perf_counter_ns()
        launched = core.schedule(following.buffer)
        scheduled = time.perf_counter_ns()
        deltas = core.commit(pending, current.buffer)
        committed = time.perf_counter_ns()
        num_characters = deliver(deltas)
        delivered = time.perf_counter_ns()
        assert len(deltas) == batch, f"{len(deltas)} of {batch} decodes in turn {turn}"
        assert num_characters > 0
        times.append((scheduled - start, committed - scheduled, committed - start, delivered - committed))
        pending = launched
    schedule, commit, step, deliver_ns = zip(*times[NUM_WARM_UP_STEPS:], strict=True)
    return StepTimes(*(statistics.median(column) / 1e3 for column in (schedule, commit, step, deliver_ns)))


def fill_cache(core: Core, slab: Slab, rng: np.random.Generator) -> None:
    """Leave every block of the pool with cached content: a long-running server evicts one for each new block."""
    config = core.config
    length = (config.max_model_len // config.block_size - 1) * config.block_size
    for _ in range(-(-config.num_blocks * config.block_size // length)):
        prompt = rng.integers(0, config.vocab_size, length, dtype=np.int32)
        core.submit(prompt.data, max_tokens=1)
    while (step := core.schedule(slab.buffer)) is not None:
        core.commit(step, slab.buffer)
    stats = core.stats()
    assert stats.num_cached_blocks == stats.num_total_blocks


def deliver(deltas: Deltas) -> int:
    """What the engine reads of every delta of an ordinary step."""
    num_characters = 0
    for delta in deltas:
        if delta.request and delta.token_ids and delta.finish_reason is None:
            num_characters += len(delta.text)
    return num_characters


def measure_admission(tokenizer: Tokenizer) -> float:
    """Median µs of submit + schedule of a prompt whose blocks are all cached."""
    config = CoreConfig(
        num_blocks=2048,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=CACHED_PROMPT_TOKENS,
        max_model_len=CACHED_PROMPT_TOKENS + 64,
        vocab_size=tokenizer.vocab_size,
    )
    core = Core(config, tokenizer.vocabulary)
    slab = Slab(core.layout)
    prompt = np.random.default_rng(0).integers(0, tokenizer.vocab_size, CACHED_PROMPT_TOKENS, dtype=np.int32)
    times = []
    for turn in range(NUM_ADMISSIONS + 1):
        start = time.perf_counter_ns()
        core.submit(prompt.data, max_tokens=1)
        step = core.schedule(slab.buffer)
        elapsed = time.perf_counter_ns() - start
        assert step is not None
        (delta,) = core.commit(step, slab.buffer)
        if turn > 0:
            assert delta.num_cached_tokens >= CACHED_PROMPT_TOKENS - BLOCK_SIZE
            times.append(elapsed)
    return statistics.median(times) / 1e3


def main() -> None:
    """Print the table and the result."""
    model = embedded_path()
    if model is None:
        raise SystemExit("the tokenizer of the embedded model is needed: run `make model`")
    tokenizer = gguf_tokenizer(read_gguf(model).metadata)
    print(f"core built as {BUILD_PROFILE}; medians in µs")
    print(f"{'decodes':>8} {'schedule':>9} {'commit':>9} {'step':>9} {'deliver':>9}")
    times = {}
    for batch in BATCHES:
        times[batch] = row = measure_steps(tokenizer, batch)
        print(f"{batch:>8} {row.schedule:>9.1f} {row.commit:>9.1f} {row.step:>9.1f} {row.deliver:>9.1f}")
    admission = measure_admission(tokenizer)
    print(f"admission of a cached prompt of {CACHED_PROMPT_TOKENS} tokens: {admission:.1f}")
    print_result(
        {
            "step_us": {str(batch): round(row.step, 1) for batch, row in times.items()},
            "deliver_us": {str(batch): round(row.deliver, 1) for batch, row in times.items()},
            "admit_cached_8k_us": round(admission, 1),
        }
    )


if __name__ == "__main__":
    main()
