"""Sampling of a step: greedy, random, truncated, with log-probabilities or penalties; share of the memory's bandwidth.

`python -m oneloop_bench.kernels.sampling [--sweep] [--only TEXT]`. Names: "top_p steep x 0256" is the options, the
logits (flat: normal; steep: a few tokens hold nearly all the mass, as in a trained model) and the rows. Counted are the
logits, once; with penalties also the marks of the tokens seen, and of those history and edited logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from oneloop_bench.kernels.timing import KernelBench, bench_arguments
from oneloop_bench.report import run_bench
from oneloop_kernels.ops.sampling.device import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    EditTables,
    SampleScratch,
    SampleStep,
    SampleVariant,
    SlotSampling,
)
from oneloop_kernels.ops.sampling.triton.configs import Division, divide
from oneloop_kernels.ops.sampling.triton.launch import launch_sample
from oneloop_kernels.ops.step_inputs import SampleOutput

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB: Final = 151_936
ROWS: Final = (1, 16, 64, 256)
COLUMNS: Final = 21
NUM_LIKELY: Final = 48
PROMPT_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 128
"""Of a row with penalties, at random: the fewest of them stand in the same group."""

PLAIN: Final[dict[str, float]] = {
    "temperature": 0.8,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "num_logprobs": -1,
}
CASES: Final[dict[str, tuple[dict[str, float], ...]]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature": ({},),
    "top_k": ({"top_k": 50},),
    "top_p": ({"top_p": 0.9},),
    "min_p": ({"min_p": 0.05},),
    "mixture": ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.05}),
    "logprobs": ({"temperature": 0.0, "num_logprobs": 20},),
    "penalties": ({"temperature": 0.0, "presence_penalty": 0.5, "penalized": 1},),
    "penalties drawn": ({"presence_penalty": 0.5, "penalized": 1},),
}
"""Parameters of the rows, taken in turn."""
STEEP_TOO: Final = ("temperature", "top_p", "mixture", "min_p")


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set: its own logits, and slots for their rows."""

    logits: torch.Tensor
    slots: SlotSampling
    step: SampleStep
    scratch: SampleScratch
    edits: EditTables | None


def make_logits(num_rows: int, vocab_size: int, device: torch.device, *, steep: bool) -> torch.Tensor:
    """[num_rows, vocab_size], bfloat16 on a GPU."""
    logits = torch.randn(num_rows, vocab_size, device=device) * 2
    if steep:
        likely = torch.randint(vocab_size, (num_rows, NUM_LIKELY), device=device)
        logits.scatter_(1, likely, torch.linspace(24, 10, NUM_LIKELY, device=device).expand(num_rows, -1))
    return logits.to(torch.bfloat16) if device.type == "cuda" else logits


def make_slots(num_rows: int, device: torch.device, shapes: tuple[dict[str, float], ...]) -> SlotSampling:
    """Slot i has the parameters of shape i mod their number."""
    slots = SlotSampling.allocate(num_rows, device)
    for row in range(num_rows):
        for name, value in (PLAIN | shapes[row % len(shapes)]).items():
            table, names = (
                (slots.floats, FLOAT_COLUMNS) if name in FLOAT_COLUMNS else (slots.ints, INT_COLUMNS)
            )
            table[row, names.index(name)] = value
    slots.seeds.copy_(torch.arange(num_rows))
    return slots


def make_step(num_rows: int, device: torch.device) -> SampleStep:
    """num_rows samples, sample i of slot i."""

    def ints(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    slab = {
        "header": torch.tensor([num_rows], device=device),
        "sample_slot": torch.arange(num_rows, dtype=torch.int32, device=device),
        "sample_output_index": torch.randint(1000, (num_rows,), device=device).to(torch.int32),
    }
    logprobs = torch.zeros(num_rows * COLUMNS, device=device)
    output = SampleOutput(ints(num_rows), ints(num_rows), ints(num_rows * COLUMNS), logprobs)
    return SampleStep(slab, {"num_samples": 0}, ints(num_rows), output)


def make_edits(num_rows: int, vocab_size: int, device: torch.device) -> EditTables:
    """Each slot has seen PROMPT_TOKENS and put out OUTPUT_TOKENS."""
    edits = EditTables.allocate(num_rows, vocab_size, device).with_history()
    seen = torch.randint(vocab_size, (num_rows, PROMPT_TOKENS + OUTPUT_TOKENS), device=device)
    if edits.history is not None:
        edits.history.scatter_(1, seen[:, :PROMPT_TOKENS], -(1 << 31))
        ones = torch.ones(num_rows, OUTPUT_TOKENS, dtype=torch.int32, device=device)
        edits.history.scatter_add_(1, seen[:, PROMPT_TOKENS:], ones)
    num_words = edits.marks.shape[1]
    bits = torch.zeros(num_rows, num_words * 32, dtype=torch.int64, device=device)
    bits.scatter_(1, seen, 1)
    shifts = torch.arange(32, device=device)
    edits.marks.copy_((bits.view(num_rows, num_words, 32) << shifts).sum(-1))  # the lower 32 bits of the sums
    return edits


def variant_of(shapes: tuple[dict[str, float], ...]) -> SampleVariant:
    """The launches that these parameters need."""
    penalties = any("penalized" in shape for shape in shapes)
    return SampleVariant(
        random=any(shape.get("temperature", 1.0) > 0 for shape in shapes),
        edits=penalties,
        penalties=penalties,
        logprobs=any("num_logprobs" in shape for shape in shapes),
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the sets of one case have in common."""

    slots: SlotSampling
    step: SampleStep
    scratch: SampleScratch
    edits: EditTables | None
    variant: SampleVariant
    vocab_size: int
    steep: bool

    @classmethod
    def of(
        cls, options: str, num_rows: int, vocab_size: int, device: torch.device, *, steep: bool
    ) -> Sampling:
        """options: of CASES."""
        shapes = CASES[options]
        variant = variant_of(shapes)
        edits = make_edits(num_rows, vocab_size, device) if variant.edits else None
        return cls(
            make_slots(num_rows, device, shapes),
            make_step(num_rows, device),
            SampleScratch.allocate(num_rows, vocab_size, device),
            edits,
            variant,
            vocab_size,
            steep,
        )

    def make(self) -> Inputs:
        """A set with logits of its own."""
        device = self.slots.seeds.device
        logits = make_logits(len(self.slots.seeds), self.vocab_size, device, steep=self.steep)
        return Inputs(logits, self.slots, self.step, self.scratch, self.edits)

    def launch(self, one: Inputs, division: Division | None = None) -> None:
        """All kernels of the variant."""
        launch_sample(one.logits, one.step, one.slots, one.scratch, one.edits, self.variant, division)


def bytes_of(options: str, num_rows: int, vocab_size: int) -> int:
    """The fewest that a case of CASES moves."""
    seen = PROMPT_TOKENS + OUTPUT_TOKENS if variant_of(CASES[options]).edits else 0
    marks = -(-vocab_size // 8) if seen else 0
    return num_rows * (2 * vocab_size + marks + 12 * seen)


def case(bench: KernelBench, options: str, num_rows: int, *, steep: bool) -> None:
    """One row of the table; with --sweep other divisions of the rows."""
    name = f"{options} {'steep' if steep else 'flat'} x {num_rows:04d}"
    if not bench.wanted(name):
        return
    vocab_size = VOCAB if bench.device.type == "cuda" else 1500
    sampling = Sampling.of(options, num_rows, vocab_size, bench.device, steep=steep)
    num_bytes = bytes_of(options, num_rows, vocab_size)
    sets = bench.sets(sampling.make, num_bytes=2 * num_rows * vocab_size)
    if not bench.sweep:
        bench.measure(name, sampling.launch, sets, num_bytes=num_bytes)
        return
    ways: dict[str, Callable[[Inputs], object]] = {"as it is": sampling.launch}
    for per_sm in (1, 2, 4, 8):
        for per_thread in (8, 16, 32):
            division = divide(num_rows, vocab_size, 132, per_thread, programs_per_sm=per_sm)
            ways[f"{per_sm} per SM, {per_thread} a thread"] = partial(sampling.launch, division=division)
    bench.best(name, ways, sets, num_bytes=num_bytes)


def main() -> None:
    """Run the bench."""
    bench = KernelBench("sampling", bench_arguments(__doc__))
    rows = ROWS if bench.device.type == "cuda" else ROWS[:1]
    for num_rows in rows:
        for options in CASES:
            case(bench, options, num_rows, steep=False)
            if options in STEEP_TOO:
                case(bench, options, num_rows, steep=True)
    bench.finish()


if __name__ == "__main__":
    run_bench(main)
