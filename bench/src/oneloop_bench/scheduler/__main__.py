"""The core beside vLLM's scheduler: `python -m oneloop_bench.scheduler`.

Both serve the same mixes on the same CPU, a few steps of one after a few of the other, and have to schedule the same.
A step is schedule and update, all that either does for it but for the model; `README.md` says what that takes in.
Times are medians of the thread's CPU time, in µs.
"""

from __future__ import annotations

import gc
import os
import statistics
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oneloop.cli.serve import allow_many_descriptors
from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import embedded_path
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop_bench.micro.core import TEXT
from oneloop_bench.report import print_result
from oneloop_bench.scheduler.compare import run_in_turns
from oneloop_bench.scheduler.core_side import CoreSide
from oneloop_bench.scheduler.environment import VLLM, PeerEnvironmentError, peer_python
from oneloop_bench.scheduler.mixes import cached_admissions, decodes, everything
from oneloop_bench.scheduler.peer import PeerSide
from oneloop_bench.scheduler.workload import VALUES_PER_ROW
from oneloop_core import BUILD_PROFILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_bench.scheduler.workload import Mix, Side, Steps
    from oneloop_core import Vocabulary

BATCHES = (256, 1024)
NUM_STEPS = 300
NUM_ADMISSIONS = 200
PEER, IDS, TEXTS, STREAMS = "vLLM", "oneloop", "oneloop, text", "with streams"


@dataclass(frozen=True)
class Medians:
    """Of the measured steps of a mix, µs."""

    submit: float
    schedule: float
    update: float
    hand_over: float
    admit: float
    """Submit and schedule."""
    step: float
    """Schedule and update."""

    @classmethod
    def of(cls, mix: Mix, steps: Steps, hand_over: Sequence[int]) -> Medians:
        """hand_over: by step, as Steps' times; empty where there is none."""
        measured = slice(mix.measured_from, mix.measured_to)
        submit, schedule, update = (
            column[measured] for column in (steps.submit, steps.schedule, steps.update)
        )
        admit = [sum(parts) for parts in zip(submit, schedule, strict=True)]
        step = [sum(parts) for parts in zip(schedule, update, strict=True)]
        columns = (submit, schedule, update, hand_over[measured] or [0], admit, step)
        return cls(*(statistics.median(column) / 1e3 for column in columns))


def serve(mix: Mix, sides: Mapping[str, Side]) -> dict[str, Steps]:
    """Run a mix on all sides and say that they agree."""
    results = run_in_turns(mix, sides)
    num_rows = sum(map(len, results[PEER].rows)) // VALUES_PER_ROW
    print(f"{mix.name}: the same {mix.num_steps} steps with {num_rows:,} rows on all sides", flush=True)
    return results


def measure(mix: Mix, sides: Mapping[str, Side]) -> dict[str, Medians]:
    """The same, with a table of times."""
    results = serve(mix, sides)
    return {name: report(name, Medians.of(mix, steps, [])) for name, steps in results.items()}


def measure_streams(mix: Mix, vocabulary: Vocabulary) -> Medians:
    """Our side with its streams: alone, as sending empties the caches of whoever comes next."""
    with closing(CoreSide(vocabulary, streams=True)) as side:
        steps = run_in_turns(mix, {STREAMS: side})[STREAMS]
        return report(STREAMS, Medians.of(mix, steps, side.hand_over))


def report(name: str, row: Medians) -> Medians:
    """A line of the table."""
    times = (row.submit, row.schedule, row.update, row.hand_over, row.admit, row.step)
    print(f"  {name:<14}" + "".join(f"{time:>11.1f}" for time in times), flush=True)
    return row


def run(tokenizer: Tokenizer, sides: Mapping[str, Side]) -> dict[str, object]:
    """All mixes; the figures by name."""
    text, vocab_size = tokenizer.encode(TEXT), tokenizer.vocab_size
    serve(everything(text, vocab_size), sides)
    names = ("submit", "schedule", "update", "hand over", "admit", "step")
    print(f"  {'µs':<14}" + "".join(f"{name:>11}" for name in names))
    result: dict[str, object] = {}
    for batch in BATCHES:
        mix = decodes(batch, NUM_STEPS, text, vocab_size)
        table = measure(mix, sides)
        result[f"ratio_{batch}"] = round(table[PEER].step / table[IDS].step, 1)
        result[f"ratio_{batch}_text"] = round(table[PEER].step / table[TEXTS].step, 1)
        result[f"step_us_{batch}"] = {name: round(row.step, 1) for name, row in table.items()}
        result[f"hand_over_us_{batch}"] = round(measure_streams(mix, tokenizer.vocabulary).hand_over, 1)
    table = measure(cached_admissions(NUM_ADMISSIONS, text, vocab_size), sides)
    result["ratio_admit_8k"] = round(table[PEER].admit / table[IDS].admit, 1)
    result["admit_us_8k"] = {name: round(row.admit, 1) for name, row in table.items()}
    return result


def main() -> None:
    """Print the table and the result."""
    model = embedded_path()
    if model is None:
        raise SystemExit("the tokenizer of the embedded model is needed: run `make model`")
    tokenizer = gguf_tokenizer(read_gguf(model).metadata)
    allow_many_descriptors()
    try:
        python = peer_python()
    except PeerEnvironmentError as error:
        raise SystemExit(f"the peer's environment: {error}") from None
    usable = os.sched_getaffinity(0)
    cpu = max(usable)
    os.sched_setaffinity(0, {cpu})  # the peer's process inherits it; they run in turns
    print(f"core built as {BUILD_PROFILE}; {VLLM}; both on CPU {cpu}")
    gc.collect()
    gc.freeze()  # as vLLM's engine does, and so its side here too
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            PEER: stack.enter_context(closing(PeerSide(python))),
            IDS: stack.enter_context(closing(CoreSide())),
            TEXTS: stack.enter_context(closing(CoreSide(tokenizer.vocabulary))),
        }
        result = run(tokenizer, sides)
    os.sched_setaffinity(0, usable)
    print_result(result)


if __name__ == "__main__":
    main()
