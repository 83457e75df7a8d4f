"""The core beside vLLM's scheduler: `python -m oneloop_bench.scheduler`.

Both serve the same mixes on the same CPU, a few steps of one after a few of the other. A step is what its process does
for it but for running the model: vLLM's schedule() and update_from_output(), which return tokens as ids; the core's
schedule(), which also writes the step as the device reads it, and commit(), with the tokens' text and without.
Times are medians of the thread's CPU time.
"""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from oneloop.cli.serve import allow_many_descriptors
from oneloop.formats.gguf import read_gguf
from oneloop.loader.embedded import embedded_path
from oneloop.tokenize.gguf import gguf_tokenizer
from oneloop_bench.micro.core import TEXT
from oneloop_bench.report import print_result
from oneloop_bench.scheduler.compare import run_in_turns
from oneloop_bench.scheduler.core_side import CoreSide
from oneloop_bench.scheduler.environment import VLLM, peer_python
from oneloop_bench.scheduler.mixes import cached_admissions, decodes, everything
from oneloop_bench.scheduler.peer import PeerSide
from oneloop_core import BUILD_PROFILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oneloop.tokenize.tokenizer import Tokenizer
    from oneloop_bench.scheduler.workload import Mix, Side, Steps

BATCHES = (256, 1024)
NUM_STEPS = 300
NUM_ADMISSIONS = 200
PEER, IDS, TEXTS = "vLLM", "oneloop, ids", "oneloop, text"


def medians_us(mix: Mix, steps: Steps, hand_over: list[int] | None = None) -> dict[str, float]:
    """Of the mix's measured steps. `step`: schedule and update; `admit`: submit and schedule."""
    measured = slice(mix.measured_from, mix.measured_to)
    columns = {
        "submit": steps.submit[measured],
        "schedule": steps.schedule[measured],
        "update": steps.update[measured],
        "hand over": hand_over[measured] if hand_over else [0],
    }
    for name, parts in {"admit": ("submit", "schedule"), "step": ("schedule", "update")}.items():
        columns[name] = [sum(times) for times in zip(*(columns[part] for part in parts), strict=True)]
    return {name: statistics.median(times) / 1e3 for name, times in columns.items()}


def measure(mix: Mix, sides: Mapping[str, Side]) -> dict[str, dict[str, float]]:
    """Run a mix, compare the schedules, print a line for each side."""
    results = run_in_turns(mix, sides)
    num_rows = sum(map(len, results[PEER].rows)) // 3
    print(f"{mix.name}: {mix.num_steps} steps with {num_rows} rows are the same on all sides", flush=True)
    if mix.measured_from == mix.measured_to:
        return {}
    table = {}
    for name, side in sides.items():
        hand_over = side.hand_over if isinstance(side, CoreSide) else None
        table[name] = row = medians_us(mix, results[name], hand_over)
        print(f"  {name:<14}" + "".join(f"{row[column]:>11.1f}" for column in row))
    return table


def ratios(table: Mapping[str, Mapping[str, float]], column: str) -> dict[str, float]:
    """How many times as long vLLM takes, by our side."""
    return {name: round(table[PEER][column] / table[name][column], 1) for name in (IDS, TEXTS)}


def run(tokenizer: Tokenizer, sides: Mapping[str, Side]) -> dict[str, object]:
    """All mixes; the figures by name."""
    text, vocab_size = tokenizer.encode(TEXT), tokenizer.vocab_size
    measure(everything(text, vocab_size), sides)
    print(f"  {'µs':<14}" + "".join(f"{name:>11}" for name in ("submit", "schedule", "update", "hand over", "admit", "step")))
    result: dict[str, object] = {}
    for batch in BATCHES:
        table = measure(decodes(batch, NUM_STEPS, text, vocab_size), sides)
        result[f"ratio_{batch}"] = ratios(table, "step")[TEXTS]
        result[f"ratio_{batch}_ids"] = ratios(table, "step")[IDS]
        result[f"us_{batch}"] = {name: round(row["step"], 1) for name, row in table.items()}
        result[f"hand_over_us_{batch}"] = round(table[TEXTS]["hand over"], 1)
    table = measure(cached_admissions(NUM_ADMISSIONS, text, vocab_size), sides)
    result["ratio_admit_8k"] = ratios(table, "admit")[TEXTS]
    result["us_admit_8k"] = {name: round(row["admit"], 1) for name, row in table.items()}
    return result


def main() -> None:
    """Print the table and the result."""
    model = embedded_path()
    if model is None:
        raise SystemExit("the tokenizer of the embedded model is needed: run `make model`")
    tokenizer = gguf_tokenizer(read_gguf(model).metadata)
    allow_many_descriptors()
    python = peer_python()
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})  # the peer's process inherits it: they run in turns
    print(f"core built as {BUILD_PROFILE}, {VLLM}, both on CPU {cpu}; medians of CPU time")
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            PEER: stack.enter_context(closing(PeerSide(python))),
            IDS: stack.enter_context(closing(CoreSide())),
            TEXTS: stack.enter_context(closing(CoreSide(tokenizer.vocabulary))),
        }
        print_result(run(tokenizer, sides))


if __name__ == "__main__":
    main()
