"""What a request gives back: SequenceDelta per step, RequestOutput for the Python API (names as vLLM's)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FinishReason = Literal["stop", "length", "abort", "error"]

TokenLogprobs: TypeAlias = "tuple[int, list[tuple[int, float]]]"
"""(rank of the sampled token, [(sampled id, logprob), (top id, logprob), …]); the sampled id always comes first."""


@dataclass(slots=True)
class SequenceDelta:
    """What was added to one sequence since its consumer last looked: of one step, or of several merged."""

    index: int
    """Which of the request's n sequences."""
    text: str
    """New text; may be empty while a character or a stop string is held back."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """One entry per new token; None when the request asked for none."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """Stop token id or stop string that matched; None for EOS and everything else."""
    error: str | None
    """One line, when finish_reason is "error"."""

    def merge(self, later: SequenceDelta) -> None:
        """Append what came after this delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error


@dataclass(slots=True)
class Logprob:
    """One entry of a top list, as vLLM's users know it."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with everything generated so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
