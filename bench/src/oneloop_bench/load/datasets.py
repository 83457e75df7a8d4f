"""Workloads that are made up: lengths and structure are what matters, the words are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from oneloop_bench.load.workload import Session, Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from oneloop_bench.load.prompts import PromptSource
    from oneloop_bench.load.workload import Prompt

SIGMA_IN: Final = 1.35
SIGMA_OUT: Final = 0.9
MEAN_IN: Final = 161.31
MEAN_OUT: Final = 337.99
SHORTEST: Final = 4
LONGEST_IN: Final = 1024
LONGEST_OUT: Final = 1024
"""Of ShareGptShape."""


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Independent prompts, lengths uniform around a mean, all after one prefix."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn from [mean · (1 − ratio), mean · (1 + ratio)]."""
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ValueError("--random-range-ratio must be from 0 to below 1")
        if self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            raise ValueError(
                "--random-input-len and --random-output-len must be 1 or more, --random-prefix-len 0 or more"
            )

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """One turn each."""
        prefix = source.draw(rng, self.prefix_len) if self.prefix_len else None
        input_lens = uniform(rng, self.input_len, self.range_ratio, count)
        output_lens = uniform(rng, self.output_len, self.range_ratio, count)
        sessions = []
        for input_len, output_len in zip(input_lens, output_lens, strict=True):
            prompt = source.draw(rng, input_len)
            sessions.append(
                _single(
                    prompt if prefix is None else source.join(prefix, prompt),
                    output_len,
                    input_len + self.prefix_len,
                )
            )
        return sessions


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """Some prefixes, each of which begins as many prompts as any other; in random order."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        if min(self.prefix_len, self.suffix_len, self.num_prefixes, self.output_len) < 1:
            raise ValueError("--prefix-repetition-…: lengths and the number of prefixes must be 1 or more")

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """One turn each."""
        prefixes = [source.draw(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        order = rng.permutation(np.arange(count) % self.num_prefixes)
        return [
            _single(
                source.join(prefixes[place], source.draw(rng, self.suffix_len)),
                self.output_len,
                self.prefix_len + self.suffix_len,
            )
            for place in order
        ]


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations in which every turn is sent with all that was said before it, replies included."""

    num_turns: int = 4
    input_len: int = 64
    output_len: int = 128
    system_len: int = 128
    """Tokens of a system message that all conversations share; 0: none."""
    think_time_s: float = 0.0
    """Mean of the pauses before a next turn, which are exponentially distributed."""

    def __post_init__(self) -> None:
        if min(self.num_turns, self.input_len, self.output_len) < 1 or self.system_len < 0:
            raise ValueError(
                "--multi-turn-…: turns and lengths must be 1 or more, the system message's 0 or more"
            )
        if self.think_time_s < 0:
            raise ValueError("--multi-turn-think-time must be 0 or more")

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """As many conversations as have `count` turns together; the last one may be shorter."""
        system = source.draw(rng, self.system_len) if self.system_len else None
        if isinstance(system, list):
            raise ValueError(
                "multi_turn sends text, since replies come as text; use it without --prompt-form ids"
            )
        sessions, left = [], count
        while left > 0:
            num_turns = min(self.num_turns, left)
            left -= num_turns
            # No input_len: what a turn holds depends on the replies before it.
            turns = [Turn(source.draw(rng, self.input_len), self.output_len) for _ in range(num_turns)]
            think_s = rng.exponential(self.think_time_s, num_turns - 1).tolist() if self.think_time_s else []
            sessions.append(Session(turns, system, think_s))
        return sessions


@dataclass(frozen=True, slots=True)
class ShareGptShape:
    """Lengths as in ShareGPT, conversations of people with ChatGPT; no dataset is needed, its words do not matter.

    Both lengths are log-normal. Their means are those published for the dataset: 161.31 tokens in, 337.99 out (Kwon et
    al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, figure 11).
    The spread (SIGMA_IN, SIGMA_OUT) is ours: a median prompt of some 75 tokens with a tail to a thousand, replies less
    spread. As usual benchmarks do, nothing is shorter than 4 tokens, prompts end at 1,024 and both together at 2,048;
    the scales are set such that the means hold after that cut.
    """

    output_len: int | None = None
    """Instead of drawn lengths of replies."""

    def lengths(self, count: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompt and output tokens, [count] each, int64."""
        return (
            cut_lognormal(rng, count, MEAN_IN, SIGMA_IN, SHORTEST, LONGEST_IN),
            cut_lognormal(rng, count, MEAN_OUT, SIGMA_OUT, SHORTEST, LONGEST_OUT),
        )

    def sessions(self, count: int, source: PromptSource, rng: np.random.Generator) -> list[Session]:
        """One turn each."""
        num_in, num_out = (lengths.tolist() for lengths in self.lengths(count, rng))
        if self.output_len is not None:
            num_out = [self.output_len] * count
        return [_single(source.draw(rng, i), o, i) for i, o in zip(num_in, num_out, strict=True)]


def uniform(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    """Whole numbers of [mean · (1 − ratio), mean · (1 + ratio)], 1 at least."""
    low, high = max(1, int(np.floor(mean * (1 - ratio)))), int(np.ceil(mean * (1 + ratio)))
    drawn: list[int] = rng.integers(low, high + 1, count).tolist()
    return drawn


def cut_lognormal(
    rng: np.random.Generator, count: int, mean: float, sigma: float, low: int, high: int
) -> NDArray[np.int64]:
    """Log-normal lengths within [low, high] (drawn anew outside of it) that have this mean, [count], int64.

    mean must lie between the bounds; the location is found by bisection on the mean of the cut distribution.
    """
    lower, upper = np.log(low) - 3 * sigma, np.log(high) + 3 * sigma
    for _ in range(60):
        middle = (lower + upper) / 2
        if _cut_mean(middle, sigma, low, high) < mean:
            lower = middle
        else:
            upper = middle
    lengths = np.zeros(0, np.int64)
    while len(lengths) < count:
        drawn = np.rint(rng.lognormal((lower + upper) / 2, sigma, 2 * count + 16)).astype(np.int64)
        lengths = np.concatenate((lengths, drawn[(drawn >= low) & (drawn <= high)]))
    return lengths[:count]


def _cut_mean(location: float, sigma: float, low: int, high: int) -> float:
    """Mean of a log-normal distribution within the bounds, by sums over equal steps of the logarithm."""
    logs = np.linspace(np.log(low), np.log(high), 2001)
    weights = np.exp(-0.5 * ((logs - location) / sigma) ** 2)
    return float((np.exp(logs) * weights).sum() / weights.sum())


def _single(prompt: Prompt, output_len: int, input_len: int) -> Session:
    return Session([Turn(prompt, output_len, input_len)])
