"""A mix of requests, and what a scheduler made of it. Both sides import this: the standard library alone.

Everything is counted in steps, so that both see the same: a request comes before a step, and what it samples depends
on nothing but its number and how many tokens it has.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict, dataclass
from typing import Any, Protocol

VALUES_PER_ROW = 3
"""Of a row of a schedule: request, tokens computed before the step, tokens of the step."""


def place(request: Any, output_index: Any, text_len: int) -> Any:
    """Where in the text the token lies that a request samples as its output of this index. Also of arrays."""
    return (request * 37 + output_index) % text_len


@dataclass(frozen=True)
class Request:
    """A request; its number is its place in the mix."""

    arrival: int
    """The step before which it is submitted. Never falls along a mix."""
    prompt: int
    """Index into the mix's prompts."""
    max_tokens: int


@dataclass(frozen=True)
class Mix:
    """Sizes of the scheduler, and what it is to serve."""

    name: str
    num_blocks: int
    """That can be used: vLLM gets one more, which it keeps for itself."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    text: list[int]
    """What requests sample from."""
    prompts: list[list[int]]
    requests: list[Request]
    num_steps: int
    """After which all requests have ended."""
    measured_from: int = 0
    measured_to: int = 0
    """Steps whose times count: from the one, up to but not including the other."""
    block_size: int = 16

    def arrivals(self, first: int, step: int) -> list[tuple[int, list[int], int]]:
        """Number, prompt and max_tokens of the requests from `first` on that come before this step.

        The prompts are new objects, as from a tokenizer or off the wire: a list that lay there for a while is no
        longer in the processor's caches.
        """
        last = first
        while last < len(self.requests) and self.requests[last].arrival <= step:
            last += 1
        return [
            (number, array("i", self.prompts[request.prompt]).tolist(), request.max_tokens)
            for number, request in enumerate(self.requests[first:last], first)
        ]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Mix:
        """Of a line that to_json() made."""
        fields = json.loads(line)
        fields["requests"] = [Request(**request) for request in fields["requests"]]
        return cls(**fields)


@dataclass
class Steps:
    """What a side did in some steps, one entry for each. Times are ns of the thread's CPU time."""

    submit: list[int]
    """Taking in the requests that come before the step."""
    schedule: list[int]
    update: list[int]
    """Taking in what the step has sampled."""
    rows: list[list[int]]
    """The schedule: VALUES_PER_ROW values for each row, by request; no row when nothing was to run."""

    @classmethod
    def none(cls) -> Steps:
        """No step."""
        return cls([], [], [], [])

    def extend(self, other: Steps) -> None:
        """Add the steps that followed."""
        self.submit += other.submit
        self.schedule += other.schedule
        self.update += other.update
        self.rows += other.rows


class Side(Protocol):
    """A scheduler under test."""

    def load(self, mix: Mix) -> None:
        """Begin anew with this mix."""

    def run(self, num_steps: int) -> Steps:
        """The next steps of it."""

    def close(self) -> None:
        """No more runs."""
